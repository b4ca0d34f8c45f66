"""A site's data sets. A new kind is a new file here, named for the kind, or a module that another installed package
announces by the kind's name under the entry point group `tessera.datasets`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from tessera.shared.problems import message_of
from tessera.worker.data.dataset import Adapter, DataError, Dataset
from tessera.worker.data.partition.division import hold_out, part_of
from tessera.worker.data.partition.schemes import SitePartition

__all__ = ["DataError", "Dataset", "SitePartition", "adapters", "load"]

KINDS = "tessera.worker.data.kinds"
GROUP = "tessera.datasets"


def load(
    kind: str,
    options: Mapping[str, object],
    *,
    part: SitePartition | None = None,
    held_out: float | None = None,
    key: bytes = b"",
) -> Dataset:
    """Return the data set of this kind, or a part of it, with this share of what is then left held out by a hash with
    `key`.

    Raises DataError naming the unknown kind, wrong option or unreadable file, or a side that is empty.
    """
    if held_out is not None and not key:
        raise ValueError("held_out: the key decides which examples are held out; give one")
    adapter = _adapter(kind)
    if adapter is None:
        raise DataError(f"kind: there is no {kind!r}; installed are {', '.join(sorted(adapters()))}")
    try:
        dataset: Dataset = adapter.open(adapter.options.model_validate(options))
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        raise DataError(f"{'.'.join(map(str, first['loc'])) or kind}: {message_of(first)}") from None
    if part is not None and part.index is not None:
        dataset = part_of(dataset, part, part.index)
    return dataset if held_out is None else hold_out(dataset, held_out, key)


def adapters() -> dict[str, Adapter[Any]]:
    """Return every installed adapter by kind. Imports what each of them needs, which takes a while."""
    kinds = {*_files(), *(entry.name for entry in entry_points(group=GROUP))}
    return {kind: adapter for kind in kinds if (adapter := _adapter(kind))}


@cache
def _adapter(kind: str) -> Adapter[Any] | None:
    """Return the adapter of a kind. No other is imported: what one reads tables with is nothing to one that does
    not."""
    module: ModuleType | None = None
    if kind in _files():
        module = importlib.import_module(f"{KINDS}.{kind}")
    else:
        for entry in entry_points(group=GROUP, name=kind):
            module = entry.load()
    return getattr(module, "ADAPTER", None)


@cache
def _files() -> frozenset[str]:
    return frozenset(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent / "kinds")]))
