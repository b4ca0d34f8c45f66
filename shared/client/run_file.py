"""A run's TOML file: a `RunSpec` without its model and version, which are uploaded."""

import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tessera.shared.api.runs import RunPatch, RunSpec
from tessera.shared.diagnostics import toml_of
from tessera.shared.methods.base import Method, MethodSpec
from tessera.shared.methods.registry import (
    MethodsUnusable,
    UnknownMethod,
    check,
    methods,
    places_searched,
    settings_type,
)
from tessera.shared.near_names import absent
from tessera.shared.problems import Fault, Invalid, faults_of, validated
from tessera.shared.tensors.lazy import digest_of

REMEDY = "Correct these settings and try again."

LIVE_KEYS = ("rounds", "cohort.quorum", "cohort.deadline_seconds")
"""Keys of a run that may change while it lives."""

UPLOADED = ("model", "version")
"""Keys of a run that the upload determines."""

Note = Callable[[str], None]
"""A receiver of remarks on settings that a change dropped."""

# Placeholder for the digests, which are known only after the upload; all else is checked before it.
_PLACEHOLDER = digest_of(b"")


def read_spec(file: Path, settings: Iterable[str] = (), note: Note = lambda _: None) -> dict[str, Any]:
    """Return a file's settings, changed by `KEY=VALUE` settings: a RunSpec but for `model` and `version`.

    Raises Invalid that lists every invalid setting.
    """
    given = read_toml(file, settings, note)
    taken = [Fault(pointer=f"/{key}", detail="is set by --model") for key in UPLOADED if key in given]
    if taken:
        raise Invalid(f"{file} has settings that the upload determines", errors=taken, remedy=REMEDY)
    check_spec(file, given)
    return given


def read_toml(file: Path, settings: Iterable[str], note: Note = lambda _: None) -> dict[str, Any]:
    """Return a file changed by `KEY=VALUE` settings: dotted keys (`cohort.quorum`), values in TOML or else text.

    Raises Invalid for a file that is missing or not TOML, and for a malformed setting.
    """
    try:
        given = toml_of(file.read_bytes())
    except FileNotFoundError:
        raise Invalid(
            absent(file, "check the path"), remedy=f"To write one: `tessera run init METHOD --out {file}`."
        ) from None
    except OSError as fault:
        raise Invalid(f"{file} cannot be read: {fault.strerror}", remedy=REMEDY) from fault
    except ValueError as fault:
        raise Invalid(f"{file} is not TOML: {fault}", remedy=REMEDY) from fault
    _change_all(given, list(settings), note)
    return given


def changed(given: dict[str, Any], settings: Iterable[str], note: Note = lambda _: None) -> dict[str, Any]:
    """Return a run's settings, changed by `KEY=VALUE` settings. Raises Invalid that lists every invalid one."""
    _change_all(given, list(settings), note)
    check_spec("the changed run", given)
    return given


def live_changes(run: str, settings: Sequence[str]) -> RunPatch:
    """Return `KEY=VALUE` settings as changes of a live run. Raises Invalid that lists every invalid one."""
    kept = [key for key, _, _ in (setting.partition("=") for setting in settings) if key.strip() not in LIVE_KEYS]
    if not kept:
        given: dict[str, Any] = {}
        _change_all(given, settings)
        return validated(RunPatch, given, "the changes are invalid")
    options = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    raise Invalid(
        f"of a live run only {', '.join(LIVE_KEYS)} can change",
        errors=[Fault(pointer=f"/{key.strip().replace('.', '/')}", detail="a live run keeps it") for key in kept],
        remedy=f"Start a new run from its last version: `tessera run create --from {run} {options}`.",
    )


def value_of(text: str) -> Any:
    """Return a value that is written in TOML, or else as plain text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` may begin a second key.
    return parsed["value"] if len(parsed) == 1 else text


def _change_all(given: dict[str, Any], settings: Sequence[str], note: Note = lambda _: None) -> None:
    """Change the settings in place.

    For another method, the settings of the method before are dropped, even those that both have: the `mu` of one is
    not the `mu` of the other.
    """
    trial = deepcopy(given)
    for setting in settings:
        _change(trial, setting)
    before, now = _method_of(given), _method_of(trial)
    if (
        before.get("name") != now.get("name")
        and isinstance(dropped := before.pop("settings", None), dict)
        and dropped
    ):
        names = ", ".join(sorted(dropped))
        note(f"{now.get('name')} starts from its own defaults; dropped settings of {before.get('name')}: {names}")
    for setting in settings:
        _change(given, setting)


def _method_of(given: Mapping[str, Any]) -> dict[str, Any]:
    method = given.get("method")
    return method if isinstance(method, dict) else {}


def steps_of(key: str) -> list[str]:
    """Return the names of the tables on the way to a dotted key, and its own; `method.layers` is short for
    `method.settings.layers`."""
    steps = key.strip().split(".")
    short = len(steps) == 2 and steps[0] == "method" and steps[1] not in MethodSpec.model_fields
    return [steps[0], "settings", steps[1]] if short else steps


def _change(given: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    *above, last = steps_of(key)
    if not equals or not last or not all(above):
        raise Invalid(f"--set {setting!r} is not KEY=VALUE", remedy="For example: --set cohort.quorum=2.")
    table = given
    for step in above:
        below = table.setdefault(step, {})
        if not isinstance(below, dict):
            raise Invalid(f"--set {setting!r}: {step} is not a table but {below!r}", remedy=REMEDY)
        table = below
    table[last] = value_of(text)


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


def installed_method(name: str) -> Method[Any]:
    """Return a method that is installed here. Raises Invalid that says which there are, and where they are sought."""
    faults = _method_faults({"name": name}, installed=True)
    if faults:
        raise Invalid(faults[0].detail, remedy="Choose one of them, or add it (`tessera docs writing-a-method`).")
    return methods()[name]


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
        raise Invalid(str(fault), remedy="Then try again.") from None
    except ValidationError as fault:
        return faults_of(fault, "/method/settings", settings_type(method.name))
    return []
