"""Data sets of which an input is read for each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.worker.data.dataset import Dataset, TableOnDisk


@dataclass(frozen=True)
class OneInput:
    """A transform of rows to one input."""

    name: str
    read: Callable[[Sequence[int]], Tensor]

    def __call__(self, places: Sequence[int]) -> dict[str, Tensor]:
        return {self.name: self.read(places)}


def on_disk(
    tensors: Mapping[str, Tensor],
    read: Callable[[Sequence[int]], Tensor],
    row: Sequence[int],
    name: str = "pixel_values",
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> Dataset:
    """A data set with an input that `read` reads from the place `first` on."""
    places = torch.arange(len(tensors["labels"])) + first
    return Dataset(dict(tensors), on_disk=TableOnDisk(OneInput(name, read), places, {name: (tuple(row), dtype)}))
