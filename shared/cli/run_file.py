"""A run's TOML file: a `RunSpec` without its model and version, which are uploaded."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import MethodsUnusable, UnknownMethod, check, places_searched, settings_type
from tessera.shared.problems import Fault, Invalid, faults_of
from tessera.shared.tensors.lazy import digest_of

REMEDY = "Correct these settings and try again; nothing was sent."

# Placeholder for the digests, which are known only after the upload; all else is checked before it.
_PLACEHOLDER = digest_of(b"")


def read_spec(file: Path, settings: Iterable[str] = ()) -> dict[str, Any]:
    """Return a file's settings, changed by `KEY=VALUE` settings: a RunSpec but for `model` and `version`.

    Raises Invalid that lists every invalid setting.
    """
    given = read_toml(file, settings)
    taken = [Fault(pointer=f"/{key}", detail="is set by --model") for key in ("model", "version") if key in given]
    if taken:
        raise Invalid(f"{file} has settings that the upload determines", errors=taken, remedy=REMEDY)
    check_spec(file, given)
    return given


def read_toml(file: Path, settings: Iterable[str]) -> dict[str, Any]:
    """Return a file changed by `KEY=VALUE` settings: dotted keys (`cohort.quorum`), values in TOML or else text.

    Raises Invalid for a file that is missing or not TOML, and for a malformed setting.
    """
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as fault:
        raise Invalid(f"{file} cannot be read: {fault.strerror}", remedy=REMEDY) from fault
    except ValueError as fault:
        raise Invalid(f"{file} is not TOML: {fault}", remedy=REMEDY) from fault
    for setting in settings:
        _change(given, setting)
    return given


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's settings as its file would have them, with all defaults."""
    return run.spec.model_dump(mode="json", exclude={"model", "version"}, exclude_none=True)


def changed(given: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Return a run's settings, changed by `KEY=VALUE` settings. Raises Invalid that lists every invalid one."""
    for setting in settings:
        _change(given, setting)
    check_spec("the changed run", given)
    return given


def _change(given: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    *above, last = key.strip().split(".")
    if not equals or not last or not all(above):
        raise Invalid(f"--set {setting!r} is not KEY=VALUE", remedy="For example: --set cohort.quorum=2.")
    table = given
    for step in above:
        below = table.setdefault(step, {})
        if not isinstance(below, dict):
            raise Invalid(f"--set {setting!r}: {step} is not a table but {below!r}", remedy=REMEDY)
        table = below
    table[last] = _value(text)


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` may begin a second key.
    return parsed["value"] if len(parsed) == 1 else text


def check_spec(file: Path | str, given: Mapping[str, Any], *, installed: bool = False) -> None:
    """Raise Invalid that lists every invalid setting of a run.

    `installed`: the method must be installed here; otherwise the coordinator may have it, and reports unknown ones.
    """
    faults = []
    try:
        RunSpec.model_validate({**given, "model": _PLACEHOLDER, "version": _PLACEHOLDER})
    except ValidationError as fault:
        faults = faults_of(fault, model=RunSpec)
    if faults := [*faults, *_method_faults(given.get("method"), installed=installed)]:
        raise Invalid(f"{file} is not a valid run", errors=faults, remedy=REMEDY)


def _method_faults(given: Any, *, installed: bool) -> list[Fault]:
    """Return the faults of a method's name and settings, if the table can be read at all."""
    try:
        method = MethodSpec.model_validate(given)
    except ValidationError:
        return []
    try:
        check(method)
    except UnknownMethod as fault:
        return [Fault(pointer="/method/name", detail=f"{fault} ({places_searched()})")] if installed else []
    except MethodsUnusable as fault:
        raise Invalid(str(fault), remedy="Then try again; nothing was sent.") from None
    except ValidationError as fault:
        return faults_of(fault, "/method/settings", settings_type(method.name))
    return []
