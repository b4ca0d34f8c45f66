"""The batches of a data set on a device, which training and evaluation iterate."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.worker.data.dataset import LABELS, Dataset

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """The batches of a data set on a device, in a new order for each pass if there is a generator."""

    dataset: Dataset
    size: int | None
    device: torch.device
    generator: torch.Generator | None = None
    skip: int = 0
    """The number of batches at the start of a pass to leave out."""

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch, _ in self.with_labels())

    def with_labels(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with its labels on the CPU, where they are counted without waiting for the device."""
        batches = self.dataset.batches(self.size, self.generator, self.skip)
        for batch in _ahead(batches) if self.dataset.on_disk else batches:
            yield {name: copied(tensor, self.device) for name, tensor in batch.items()}, batch[LABELS]


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device. A GPU copies from pinned memory, for which this thread does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, each read while the one before it is used."""
    with ThreadPoolExecutor(1, "reading") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch
