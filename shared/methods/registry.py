"""The registry of methods. A new method is a new file: in this package, in a folder of the environment variable
TESSERA_METHODS, or in an installed package with an entry point in the group `tessera.methods`. Methods are installed
by the operator of a process; they are never sent over the network."""

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
"""The environment variable with the folders of methods, separated as in PATH."""


class UnknownMethod(ValueError):
    """A name that no installed method has."""


class MethodsUnusable(ValueError):
    """Installed methods or folders that cannot be used. The message says which, and what to change."""


@cache
def methods() -> dict[str, Method[Any]]:
    """Return every installed method by name. Raises MethodsUnusable for a duplicate name or a missing folder."""
    here = [str(Path(__file__).parent)]
    found = [importlib.import_module(f"{__package__}.{info.name}") for info in pkgutil.iter_modules(here)]
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
            raise MethodsUnusable(f"{FOLDERS} names {folder}, which is not a folder: create it or remove it there")
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
    """Raise UnknownMethod, or pydantic's ValidationError for invalid settings."""
    _method(chosen)


def sticky(chosen: MethodSpec) -> bool:
    """Return whether each site stays with one worker (`CoordinatorHalf.sticky`); False if not installed."""
    method = methods().get(chosen.name)
    return method is not None and method.coordinator.sticky


def charts(chosen: MethodSpec) -> tuple[Chart, ...]:
    """Return the method's charts; none if it is not installed."""
    method = methods().get(chosen.name)
    return method.charts if method else ()


def coordinator_half(chosen: MethodSpec, run: RunInfo) -> CoordinatorHalf[Any]:
    method, settings = _method(chosen)
    return method.coordinator(settings, run)


def worker_half(chosen: MethodSpec, run: RunInfo) -> WorkerHalf[Any]:
    method, settings = _method(chosen)
    return method.worker(settings, run)
