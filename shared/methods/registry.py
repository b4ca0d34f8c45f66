"""The registry of methods. A new method is a new file: in this package, in a folder of the environment variable
TESSERA_METHODS, or in an installed package with an entry point in the group `tessera.methods`. Methods are installed
by the operator of a process; they are never sent over the network."""

import hashlib
import importlib
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isasyncgenfunction, iscoroutinefunction, isfunction, isgeneratorfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
    Method,
    MethodSettings,
    MethodSpec,
    RunInfo,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.near_names import did_you_mean, nearest
from tessera.shared.schema import MAX_NUMBER

FOLDERS = "TESSERA_METHODS"
"""The environment variable with the folders of methods, separated as in PATH."""


class UnknownMethod(ValueError):
    """A name that no installed method has."""


class MethodsUnusable(ValueError):
    """Installed methods or folders that cannot be used. The message says which, and what to change."""


_log = logging.getLogger("tessera")

_skipped: list[tuple[str, str]] = []
"""Files and entry points from which no method was read, each with the reason.

Replaced in one step: another thread may read the methods at the same time.
"""


@cache
def methods() -> dict[str, Method[Any]]:
    """Return every installed method by name. Skip files and entry points that cannot be imported, or declare no
    method, with a warning.

    Raises MethodsUnusable for a duplicate name or a missing folder.
    """
    skipped: dict[str, str] = {}
    here = [str(Path(__file__).parent)]
    found = [importlib.import_module(f"{__package__}.{info.name}") for info in pkgutil.iter_modules(here)]
    for where, load in _installed_elsewhere():
        try:
            module = _imported(where, load)
            faults = list(method_faults(module)) if hasattr(module, "METHOD") else []
        except Exception as fault:  # noqa: BLE001  (other people's code; one broken file must not stop the others)
            skipped[where] = f"{type(fault).__name__}: {fault}"
            continue
        if faults:
            skipped[where] = "; ".join(faults)
        elif hasattr(module, "METHOD"):
            found.append(module)
        elif not Path(where).name.startswith("_"):
            # A file such as __init__.py, or of code that methods share, is not a method.
            skipped[where] = "it declares no METHOD; begin the name of a file that should have none with _"
    _skipped[:] = skipped.items()
    for where, reason in skipped.items():
        _log.warning("warning: no method was read from %s: %s", where, reason)
    by_name: dict[str, ModuleType] = {}
    for module in found:
        if hasattr(module, "METHOD"):
            other = by_name.setdefault(module.METHOD.name, module)
            if other is not module:
                files = f"{other.__file__} and {module.__file__}"
                raise MethodsUnusable(f"{files} both declare the method {module.METHOD.name!r}: rename one")
    return {name: module.METHOD for name, module in by_name.items()}


def _imported(where: str, load: Callable[[], ModuleType]) -> ModuleType:
    had_torch = "torch" in sys.modules
    module = load()
    if "torch" in sys.modules and not had_torch:
        _log.warning(
            "warning: %s imports torch when it is read, which takes 400 MB and which a coordinator does without: "
            "import it under TYPE_CHECKING, and in those functions of the worker's half that call it",
            where,
        )
    return module


def method_faults(module: ModuleType) -> Iterator[str]:
    """Yield the reasons why parts of a module would not act: a hook of a misspelt name, of the other
    half or with other parameters is never called, and neither is a half that `METHOD` does not name."""
    method = module.METHOD
    if not isinstance(method, Method):
        yield f"METHOD is {method!r}: make it a Method"
        return
    used: set[type] = set()
    for part, base, other in (("coordinator", CoordinatorHalf, WorkerHalf), ("worker", WorkerHalf, CoordinatorHalf)):
        half = getattr(method, part)
        if not (isinstance(half, type) and issubclass(half, base)):
            yield f"METHOD has {half!r} as its {part}: give a subclass of {base.__name__}"
            continue
        used |= {*(cls for cls in half.__mro__ if cls not in base.__mro__), base}
        yield from _half_faults(half, base, other)
    yield from _range_faults(method.worker)
    here = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
    for cls in here:
        if issubclass(cls, CoordinatorHalf | WorkerHalf) and cls not in used and not cls.__name__.startswith("_"):
            part = "coordinator" if issubclass(cls, CoordinatorHalf) else "worker"
            yield f"METHOD does not name {cls.__name__}: pass it as {part}, or begin its name with _"


MAX_METRICS = 16
"""Limit on the figures of a method's own."""
_METRIC_NAME = re.compile(r"own_[a-z0-9_]{1,40}")


def _range_faults(half: type) -> Iterator[str]:
    """Yield the reasons why a worker half's own figures cannot be measured."""
    ranges = getattr(half, "metric_ranges", {})
    if not isinstance(ranges, Mapping) or len(ranges) > MAX_METRICS:
        yield f"{half.__name__}.metric_ranges: give a dict of at most {MAX_METRICS} names"
        return
    if bool(ranges) != (getattr(half, "metrics", None) is not WorkerHalf.metrics):
        yield f"{half.__name__}: define metrics and metric_ranges together, each without the other has no effect"
    for name, given in ranges.items():
        if not _METRIC_NAME.fullmatch(str(name)):
            yield f"{half.__name__}.metric_ranges: {name!r} has to begin with own_ (a to z, digits and _ alone)"
        try:
            low, high = given
            is_range = -MAX_NUMBER <= low < high <= MAX_NUMBER
        except (TypeError, ValueError):
            is_range = False
        if not is_range:
            yield f"{half.__name__}.metric_ranges: {name!r} is {given!r}: give the least and the largest value"


def _half_faults(half: type, base: type, other: type) -> Iterator[str]:
    """Yield the public attributes of a half, and of its bases but for `base`, that are no hook that is called."""
    before = half.__mro__[: half.__mro__.index(base)]
    for cls in half.__mro__:
        for name, value in vars(cls).items():
            if name.startswith("_") or cls in base.__mro__:
                continue
            if fault := _hook_fault(name, value, base, other):
                yield f"{cls.__name__}.{name} {fault}"
            elif cls not in before:
                yield f"{cls.__name__}.{name} is hidden by {base.__name__}: name {cls.__name__} before it"


def _hook_fault(name: str, value: object, base: type, other: type) -> str:
    """Return the reason why a public attribute of a half is no hook or setting of its base; empty if it is one."""
    if not hasattr(base, name):
        if hasattr(other, name):
            return f"is a hook of {other.__name__}, which {base.__name__} does not call: move it to the other half"
        known = [each for each in vars(base) if not each.startswith("_")]
        near = f"; did you mean `{close}`?" if (close := nearest(name, known)) else ""
        return f"is no hook of {base.__name__}{near} Begin the names of your own methods and attributes with _"
    declared = getattr(base, name)
    if isinstance(declared, bool) and not isinstance(value, bool):
        return f"is {value!r}: set it to True or False"
    if not isfunction(declared):
        return ""
    if not callable(value) and not isinstance(value, staticmethod | classmethod):
        return f"is {value!r}, and has to be a method"
    code = getattr(value, "__func__", value)
    is_lazy = isgeneratorfunction(code) and declared.__annotations__.get("return") == "None"
    if is_lazy or iscoroutinefunction(code) or isasyncgenfunction(code):
        return "would not run when it is called: leave out " + ("yield" if is_lazy else "async")
    if isfunction(value):
        given = signature(declared)
        try:
            signature(value).bind(*given.parameters)
        except TypeError:
            return f"takes {signature(value)}, and is called with {given}"
    return ""


def _installed_elsewhere() -> Iterator[tuple[str, Callable[[], ModuleType]]]:
    """Yield the place of each further method, and a function that imports it."""
    for entry in entry_points(group="tessera.methods"):
        yield f"the entry point {entry.name} = {entry.value}", entry.load
    for folder in _folders():
        if not folder.is_dir():
            raise MethodsUnusable(f"{FOLDERS} names {folder}, which is not a folder: create it or remove it there")
        for file in sorted(folder.glob("*.py")):
            yield str(file), partial(_from_file, file)


def _folders() -> list[Path]:
    return [Path(folder) for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]


def _from_file(file: Path) -> ModuleType:
    name = f"tessera_methods.{file.stem}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def places_searched() -> str:
    """Return the places searched for methods besides this package, and the files skipped there, for people who may
    read this machine's paths."""
    folders = ", ".join(map(str, _folders()))
    searched = f"files of {FOLDERS} were looked for in: {folders}" if folders else f"{FOLDERS} is not set"
    skipped = "".join(f"; skipped: {where} ({fault})" for where, fault in _skipped)
    return searched + skipped


def _method(chosen: MethodSpec) -> tuple[Method[Any], MethodSettings]:
    method = methods().get(chosen.name)
    if method is None:
        raise UnknownMethod(f"there is no method {chosen.name!r}{did_you_mean(chosen.name, methods())}")
    return method, method.settings.model_validate(chosen.settings)


def check(chosen: MethodSpec) -> None:
    """Raise UnknownMethod, or pydantic's ValidationError for invalid settings."""
    _method(chosen)


def settings_type(name: str) -> type[MethodSettings]:
    """Return the type of an installed method's settings."""
    return methods()[name].settings


def own_file_digest(name: str) -> str | None:
    """Return the sha-256 of the file of an installed method, or None for a method of Tessera itself.

    Other modules that the file imports do not count.
    """
    files = _own_files(methods()[name])
    return hashlib.sha256(b"".join(files)).hexdigest() if files else None


def _own_files(method: Method[Any]) -> list[bytes]:
    """Return the content of a method's files; none for a method of Tessera itself."""
    modules = {part.__module__ for part in (method.coordinator, method.worker, method.settings)}
    own = sorted(module for module in modules if not module.startswith(f"{__package__}."))
    files = [Path(file) for module in own if (file := getattr(sys.modules[module], "__file__", None))]
    return [file.read_bytes() for file in files]


_READS_ROUNDS = re.compile(rb"^(?! *(?:from|import) ).*\.rounds\b", re.MULTILINE)
"""The package `shared.rounds` may be imported."""


def check_rounds(chosen: MethodSpec, run: RunInfo) -> None:
    """Raise UnsupportedRun if a run under way cannot change to `run.rounds` rounds."""
    method, settings = _method(chosen)
    # The declaration of a method of Tessera, from which this method inherits, does not cover its own reading.
    declared = not method.coordinator.check_rounds.__module__.startswith(f"{__package__}.")
    if not declared and any(map(_READS_ROUNDS.search, _own_files(method))):
        raise UnsupportedRun(
            f"the file of {chosen.name} reads the number of rounds, and does not say what follows from it "
            "(CoordinatorHalf.check_rounds)"
        )
    method.coordinator(settings, run).check_rounds()


def sticky(chosen: MethodSpec) -> bool:
    """Return True if each site stays with one worker (`CoordinatorHalf.sticky`); False if not installed."""
    method = methods().get(chosen.name)
    return method is not None and method.coordinator.sticky


def keeps_nothing(chosen: MethodSpec) -> bool:
    """Return True if a method surely keeps no tensors at the sites; False if it is not installed."""
    method, parts = methods().get(chosen.name), ("private", "setup", "collect")
    kept = method is None or any(getattr(method.worker, name) is not getattr(WorkerHalf, name) for name in parts)
    return not kept and not probe_examples(chosen)


def probe_examples(chosen: MethodSpec) -> int:
    """Return the method's `probe_examples` with these settings; 0 if it is not installed, or they are not valid."""
    try:
        return _method(chosen)[1].probe_examples
    except (UnknownMethod, ValidationError):
        return 0


def epochs_left(chosen: MethodSpec, most: int) -> int:
    """Return `MethodSettings.epochs_left`. Raises as `check`."""
    return _method(chosen)[1].epochs_left(most)


def charts(chosen: MethodSpec) -> tuple[Chart, ...]:
    """Return the method's charts; none if it is not installed."""
    method = methods().get(chosen.name)
    return method.charts if method else ()


def needs_one_example_per_row(chosen: MethodSpec) -> bool:
    """Return `one_example_per_row` of the method's worker half."""
    return _method(chosen)[0].worker.one_example_per_row


def chooses_blocks(chosen: MethodSpec) -> bool:
    """Return True if the method's worker half has a choice of blocks of its own, which may look at data."""
    return _method(chosen)[0].worker.select is not WorkerHalf.select


def beyond_script(chosen: MethodSpec) -> str | None:
    """Return the reason why a site's own script cannot train by a method; None if it can. Raises as `check`."""
    method, settings = _method(chosen)
    beyond = method.worker.beyond_training(settings)
    return beyond and f"the method {chosen.name} {beyond}, which a site's own script does not do"


def regional() -> list[str]:
    """Return the methods that a region can do for its sites with some settings."""

    def may(half: type[CoordinatorHalf[Any]]) -> bool:
        declared = half.declared("regional")
        return not declared.fault or bool(declared.settings)

    return [name for name, method in methods().items() if may(method.coordinator)]


def coordinator_half(chosen: MethodSpec, run: RunInfo) -> CoordinatorHalf[Any]:
    method, settings = _method(chosen)
    return method.coordinator(settings, run)


def worker_half(chosen: MethodSpec, run: RunInfo) -> WorkerHalf[Any]:
    method, settings = _method(chosen)
    return method.worker(settings, run)
