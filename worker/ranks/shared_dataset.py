"""Data sets on their way to a rank, and a rank's rows of one. Loaders import it, so it imports no transformers."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.worker.data.dataset import Dataset, RowsOnDisk
from tessera.worker.data.loaders import LoaderProcesses

# ------------------------------------------------------------ from the agent to a rank


def parts_of(dataset: Dataset) -> dict[str, Any]:
    """Return what training and evaluation read of a data set, to hand it to a rank.

    Raises TypeError, AttributeError or PicklingError for rows on disk that another process cannot read.
    """
    loaders = dataset.loaders
    return {
        "tensors": dataset.tensors,
        "common": dataset.common,
        "held_out": dataset.held_out and parts_of(dataset.held_out),
        "padding": dataset.padding,
        "groups": None if dataset.groups is None else list(dataset.groups),
        "schema": dataset.schema,
        "normalization": dataset.normalization,
        "on_disk": {name: _parts_of_rows(stored) for name, stored in dataset.on_disk.items()},
        "loaders": [loaders.count, loaders.pinned] if isinstance(loaders, LoaderProcesses) else None,
    }


def dataset_of(parts: dict[str, Any]) -> Dataset:
    """Return the data set of these parts, with loaders of this process."""
    held_out, loaders = parts["held_out"], parts["loaders"]
    return Dataset(
        parts["tensors"],
        parts["common"],
        held_out=held_out and dataset_of(held_out),
        padding=parts["padding"],
        groups=parts["groups"],
        schema=parts["schema"],
        normalization=parts["normalization"],
        on_disk={name: _rows_of(stored) for name, stored in parts["on_disk"].items()},
        loaders=loaders and LoaderProcesses(loaders[0], pinned=loaders[1]),
    )


def _parts_of_rows(stored: RowsOnDisk) -> dict[str, Any]:
    buffers: list[pickle.PickleBuffer] = []
    # Readers of any kind are functions with a state. torch's DataLoader pickles them for its processes too.
    functions = pickle.dumps((stored.read, stored.finish), protocol=5, buffer_callback=buffers.append)
    plain = {name: getattr(stored, name) for name in ("places", "row", "dtype", "in_loaders")}
    pickled = [memoryview(functions), *(buffer.raw() for buffer in buffers)]
    return {**plain, "functions": [np.frombuffer(each, np.uint8) for each in pickled]}


def _rows_of(parts: dict[str, Any]) -> RowsOnDisk:
    functions, *buffers = parts.pop("functions")
    read, finish = pickle.loads(functions, buffers=buffers)  # noqa: S301  (of the agent, in a folder of its user)
    return RowsOnDisk(read, finish=finish, **parts)


# ------------------------------------------------------------ a rank's rows


@dataclass(frozen=True, eq=False, repr=False)
class SharedDataset(Dataset):
    """A data set of which a rank reads every `size`-th row of each batch, from its own number on.

    A batch that has no row for the rank is empty.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, dataset: Dataset, rank: int, size: int) -> "SharedDataset":
        """Return a rank's data set."""
        plain = {each.name: getattr(dataset, each.name) for each in fields(Dataset)}
        plain["on_disk"] = {
            name: replace(stored, read=ReadsNothing(stored.read, int(stored.places[0])))
            for name, stored in dataset.on_disk.items()
        }
        return cls(**plain, rank=rank, size=size)

    def order(
        self, batch_size: int | None, generator: torch.Generator | None = None, skip: int = 0
    ) -> Sequence[Tensor]:
        return [rows[self.rank :: self.size] for rows in super().order(batch_size, generator, skip)]


@dataclass(frozen=True)
class ReadsNothing:
    """A reader of rows on disk that accepts an empty list of places."""

    read: Callable[[Sequence[int]], Tensor]
    first: int
    """Any place that has a row."""

    def __call__(self, places: Sequence[int]) -> Tensor:
        return self.read(places) if places else self.read([self.first])[:0]
