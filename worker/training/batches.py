"""The batches of a data set on a device, which training and evaluation iterate."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.loaders import finished, stream

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """The batches of a data set on a device, in a new order for each pass if there is a generator."""

    dataset: Dataset
    size: int | None
    device: torch.device
    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in stream(self.dataset, self.size, self.generator):
            # The copy of pinned memory, which loaders return, need not be waited for.
            moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
            yield finished(self.dataset, moved)
