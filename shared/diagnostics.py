"""Checks that `doctor` commands run, and where each setting comes from."""

import json
import re
import ssl
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr

from tessera.shared.urls import without_password

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, "warn", detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, "fail", detail, remedy)


def reason_of(fault: Exception) -> str:
    """Return the reason why a file cannot be used, without the path, the system's number and OpenSSL's own source
    lines."""
    if isinstance(fault, ssl.SSLError):
        return fault.reason.replace("_", " ").lower() if fault.reason else "it is no PEM file of this kind"
    return getattr(fault, "strerror", None) or str(fault)


MISMATCHES = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's reasons for the key of another certificate; the second one is for keys of different types."""


def pem_fault(fault: OSError, certificate: Path, key: Path | None) -> str:
    """Return the unusable file of a certificate and its key, and the reason."""
    if isinstance(fault, ssl.SSLError) and fault.reason in MISMATCHES:
        first = f"the first certificate in {certificate}, which has to be the own one"
        return f"{key or certificate} has not the key of {first}"
    for file, kind in ((certificate, "CERTIFICATE"), (key or certificate, "PRIVATE KEY")):
        try:
            text = file.read_bytes()
        except OSError as unread:
            return f"{file} cannot be read: {reason_of(unread)}"
        if f"{kind}-----".encode() not in text:
            return f"{file} has no {kind.lower()} in PEM, which begins with -----BEGIN {kind}-----"
        if kind == "PRIVATE KEY" and b"ENCRYPTED" in text:
            return f"{file} is encrypted; `openssl pkey -in {file} -out NEW` writes it without a passphrase"
    return f"{certificate}{f' and {key}' if key else ''}: {reason_of(fault)}"


_PLACE = re.compile(r"at line (\d+), column \d+")
_TWICE = re.compile(r"Cannot declare \((.+?),?\) twice")

_TOML_HINTS = (
    (r"=\s*\{[^}]*$", "write a table in braces in one line"),
    (
        "[\u201c-\u201f\u2018-\u201b\u00ab\u00bb]",
        "that line has the quotation marks of a word processor: write the plain one of the keyboard",
    ),
    (r'"[^"]*\\', "write \\ in a path as /, or put the path between single quotes"),
    (r"=\s*(True|False|TRUE|FALSE|None|yes|no|on|off)\b", "write true or false"),
    (r"=\s*-?\d+,\d", "write a decimal number with a point"),
    (r"^\s*[\w.-]+\s*:", "write key = value, with = between them"),
    (r'^[^"]*"([^"]*"[^"]*")*[^"]*$|Unterminated string', "a quotation mark is missing"),
    (r"=\s*[+-]?\.\d", "write a zero before the point"),
    (r"=\s*\d+ \d", "write a number without spaces"),
    (r"=\s*[^\s\d\"'\[{+-]", "put text between double quotes"),
    (r'=\s*("[^"]*"|[\d.]+)\s*,', "write several values in brackets, as in [1, 2]"),
    (r"^\s*\[[^\]]*$|Unclosed array", "a closing ], or the comma between two values, is missing"),
    (r"^\s*\[[^\]\"]*\s", "write a name without spaces, or between double quotes"),
    ("Cannot overwrite a value", "this key is in the table already: remove one of the two"),
    ("Expected '='", "write key = value"),
)
"""Remedies by a pattern of the line where parsing stopped, or of the parser's message."""


def toml_of(raw: bytes) -> dict[str, Any]:
    """Return the content of a TOML file. Raises TOMLDecodeError that names the place and the likely remedy."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise tomllib.TOMLDecodeError(f"byte {fault.start} is not UTF-8; save the file as UTF-8") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        if twice := _TWICE.match(str(fault)):
            name = twice[1].replace("'", "").replace(", ", ".")
            found = f"the table [{name}] is there twice{str(fault)[twice.end() :]}; write the lines of both under one"
            raise tomllib.TOMLDecodeError(found) from None
        place = _PLACE.search(str(fault))
        line = text.split("\n")[int(place[1]) - 1] if place else ""
        for pattern, remedy in _TOML_HINTS:
            if re.search(pattern, line) or re.search(pattern, str(fault)):
                raise tomllib.TOMLDecodeError(f"{fault}; {remedy}") from None
        raise


def examined(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield the findings of each check. One that breaks is a finding too: an examination goes on to its end."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as fault:  # noqa: BLE001  (what is not well may be anything)
            reason = str(fault).splitlines()[0] if str(fault) else ""
            if isinstance(fault, OSError) and fault.strerror:
                where = f"{fault.filename}: " if fault.filename else ""
                yield fail(name, f"could not be looked at: {where}{fault.strerror}", "Repair that, then look again.")
            else:
                yield fail(
                    name,
                    f"could not be looked at: {type(fault).__name__}: {reason[:300]}",
                    "Look at the place that the message names.",
                )


HIDDEN = "***"

_SECRET = re.compile(
    r"(^|_)(token|secret|password|passwd|passphrase|credentials?|(api|access|private|account)_?key)$"
)
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    name: str
    value: Any
    origin: str
    """`default`, `file`, or the name of a variable of the environment."""


def flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, each under its dotted name."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from flat(below, f"{above}.{key}" if above else str(key))
    elif above:
        yield above, value


def shown(name: str, value: Any) -> Any:
    """Return a value for display, without parts that are secret by their type, name, or place in a URL."""
    if isinstance(value, SecretStr) or (value and _SECRET.search(name.rpartition(".")[2].lower())):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [shown(name, item) for item in value]
    if isinstance(value, Mapping):
        return {key: shown(str(key), item) for key, item in value.items()}
    if isinstance(value, str) and _URL.match(value):
        return without_password(value)
    return value


def effective(
    values: Mapping[str, Any], file: Mapping[str, Any], environment: Mapping[str, str], prefix: str
) -> list[Setting]:
    """`values` are the settings in force, `file` what a settings file says, and `environment` what wins over it in
    variables that begin with `prefix` and have `__` between the parts of a name."""
    of_file = {name.lower() for name, _ in flat(file)}
    of_environment = _by_name(environment, prefix)
    found = []
    for name, value in flat(values):
        variable = of_environment.get(name.lower())
        origin = variable or ("file" if _is_under(name.lower(), of_file) else "default")
        found.append(Setting(name, shown(name, value), origin))
    return found


def _is_under(name: str, given: set[str]) -> bool:
    """Return True if a setting, or a list or table that it is in, was given."""
    return any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in given)


def _by_name(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the variable that each setting comes from. A variable may hold a whole table, as JSON."""
    found: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.upper().startswith(prefix):
            continue
        name = variable[len(prefix) :].lower().replace("__", ".")
        found[name] = variable
        try:
            parsed = json.loads(text)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            found |= {below.lower(): variable for below, _ in flat(parsed, name)}
    return found


def toml(value: Any) -> str:
    """Return a value as TOML on one line. Keys of tables that are None are left out."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {toml(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    # A date or a time is a text. TOML, unlike JSON, has no raw DEL.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def toml_file(values: Mapping[str, Any], above: str = "") -> str:
    """Return a document as TOML, with a heading for each table. Keys that are None are left out."""
    tables = {key: each for key, each in values.items() if isinstance(each, dict)}
    simple = (f"{_key(key)} = {toml(each)}\n" for key, each in values.items() if not isinstance(each, dict | None))
    parts = (f"\n[{above}{_key(key)}]\n" + toml_file(each, f"{above}{_key(key)}.") for key, each in tables.items())
    return "".join((*simple, *parts))
