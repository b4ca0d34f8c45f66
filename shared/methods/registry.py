"""The methods there are. A new one is a new file: here, in a folder that the environment's TESSERA_METHODS names, or
in another installed package that announces it under the entry point group `tessera.methods`. Whoever runs a process
decides on its methods; none ever comes over the wire."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
    Method,
    MethodSettings,
    MethodSpec,
    RunInfo,
    WorkerHalf,
)

FOLDERS = "TESSERA_METHODS"
"""The environment variable that names folders with methods, divided as in PATH."""


_HERE = [str(Path(__file__).parent)]


class UnknownMethod(ValueError):
    """No installed method has this name."""


class MethodsUnusable(ValueError):
    """What is installed or named as methods cannot be used. The text says which, and what to do."""


@cache
def methods() -> dict[str, Method[Any]]:
    """Return every installed method by name. Raises MethodsUnusable if two claim one name, or a folder is not
    there."""
    found = [importlib.import_module(f"{__package__}.{info.name}") for info in pkgutil.iter_modules(_HERE)]
    found += [entry.load() for entry in entry_points(group="tessera.methods")]
    found += _from_folders()
    by_name: dict[str, ModuleType] = {}
    for module in found:
        if hasattr(module, "METHOD"):
            other = by_name.setdefault(module.METHOD.name, module)
            if other is not module:
                files = f"{other.__file__} and {module.__file__}"
                raise MethodsUnusable(f"{files} both declare the method {module.METHOD.name!r}: rename one")
    return {name: module.METHOD for name, module in by_name.items()}


def _from_folders() -> Iterator[ModuleType]:
    for folder in map(Path, filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))):
        if not folder.is_dir():
            raise MethodsUnusable(f"{FOLDERS} names {folder}, which is no folder: make it, or leave it out")
        for file in sorted(folder.glob("*.py")):
            name = f"tessera_methods.{file.stem}"
            spec = spec_from_file_location(name, file)
            if spec is None or spec.loader is None:
                continue
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module


def _method(chosen: MethodSpec) -> tuple[Method[Any], MethodSettings]:
    method = methods().get(chosen.name)
    if method is None:
        raise UnknownMethod(f"there is no method {chosen.name!r}; installed are {', '.join(sorted(methods()))}")
    return method, method.settings.model_validate(chosen.settings)


def check(chosen: MethodSpec) -> None:
    """Raise UnknownMethod, or pydantic's ValidationError for settings that the method does not take."""
    _method(chosen)


def sticky(chosen: MethodSpec) -> bool:
    """Return whether a site stays with one worker (`CoordinatorHalf.sticky`); False for a method that is not
    installed."""
    method = methods().get(chosen.name)
    return method is not None and method.coordinator.sticky


def charts(chosen: MethodSpec) -> tuple[Chart, ...]:
    """Return the charts that the method declares; none for a method that is not installed."""
    method = methods().get(chosen.name)
    return method.charts if method else ()


def coordinator_half(chosen: MethodSpec, run: RunInfo) -> CoordinatorHalf[Any]:
    method, settings = _method(chosen)
    return method.coordinator(settings, run)


def worker_half(chosen: MethodSpec, run: RunInfo) -> WorkerHalf[Any]:
    method, settings = _method(chosen)
    return method.worker(settings, run)
