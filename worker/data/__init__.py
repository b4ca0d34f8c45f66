"""A site's data sets. A new kind is a new file here, or a module that another installed package announces under the
entry point group `tessera.datasets`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from worker.data.dataset import Adapter, DataError, Dataset

__all__ = ["DataError", "Dataset", "adapters", "load"]


@cache
def adapters() -> dict[str, Adapter[Any]]:
    """Every installed adapter by kind."""
    found = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found += [entry.load() for entry in entry_points(group="tessera.datasets")]
    return {module.ADAPTER.kind: module.ADAPTER for module in found if hasattr(module, "ADAPTER")}


def load(kind: str, options: Mapping[str, object]) -> Dataset:
    """The data set of this kind. Raises DataError naming the unknown kind, wrong option or unreadable file."""
    adapter = adapters().get(kind)
    if adapter is None:
        raise DataError(f"kind: there is no {kind!r}; installed are {', '.join(sorted(adapters()))}")
    try:
        dataset: Dataset = adapter.open(adapter.options.model_validate(options))
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        raise DataError(f"{'.'.join(map(str, first['loc'])) or kind}: {first['msg']}") from None
    return dataset
