"""Checks that `doctor` commands run, and where each setting comes from."""

import json
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    """Return why a file cannot be used, without the path, the system's number and OpenSSL's own source lines."""
    if isinstance(fault, ssl.SSLError):
        return fault.reason.replace("_", " ").lower() if fault.reason else "it is no PEM file of this kind"
    return getattr(fault, "strerror", None) or str(fault)


def examined(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield the findings of each check. One that breaks is a finding too: an examination goes on to its end."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as fault:  # noqa: BLE001  (what is not well may be anything)
            reason = str(fault).splitlines()[0] if str(fault) else ""
            yield fail(name, f"could not be looked at: {type(fault).__name__}: {reason[:300]}", "See what it names.")


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
    """Return whether a setting, or a list or table that it is in, was given."""
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
