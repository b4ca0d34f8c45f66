"""A rank's rows of a data set. Loaders import it, so it imports no transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tessera.worker.data.dataset import Dataset


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
