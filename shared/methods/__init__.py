"""The methods there are. A new one is a new file here, or a module that another installed package announces under
the entry point group `tessera.methods`. Methods come only from installed code, never over the wire."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from shared.blocks import Frozen
from shared.methods.contract import CoordinatorHalf, Method, MethodSettings, RunFacts, WorkerHalf


class UnknownMethod(ValueError):
    """No installed method has this name."""


class Chosen(Frozen):
    """A method by name, with its settings: what a run and a task carry."""

    name: str
    settings: dict[str, Any] = {}


@cache
def methods() -> dict[str, Method[Any]]:
    """Every installed method by name."""
    found = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found += [entry.load() for entry in entry_points(group="tessera.methods")]
    return {module.METHOD.name: module.METHOD for module in found if hasattr(module, "METHOD")}


def _method(chosen: Chosen) -> tuple[Method[Any], MethodSettings]:
    method = methods().get(chosen.name)
    if method is None:
        raise UnknownMethod(f"there is no method {chosen.name!r}; installed are {', '.join(sorted(methods()))}")
    return method, method.settings.model_validate(chosen.settings)


def check(chosen: Chosen) -> None:
    """Raises UnknownMethod, or pydantic's ValidationError for settings that the method does not take."""
    _method(chosen)


def coordinator_half(chosen: Chosen, run: RunFacts) -> CoordinatorHalf[Any]:
    method, settings = _method(chosen)
    return method.coordinator(settings, run)


def worker_half(chosen: Chosen, run: RunFacts) -> WorkerHalf[Any]:
    method, settings = _method(chosen)
    return method.worker(settings, run)


__all__ = [
    "Chosen",
    "UnknownMethod",
    "ValidationError",
    "check",
    "coordinator_half",
    "methods",
    "worker_half",
]
