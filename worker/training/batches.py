"""The batches of a data set on a device, which training and evaluation iterate."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tessera.worker.data.augmentation import SeededAugmentation
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.data.loaders import finished, stream, stream_readable
from tessera.worker.training.optimization.trimming import trimmed

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
    augmentation: SeededAugmentation | None = None
    """The changes of images, in training alone."""
    trims: bool = False
    """True if texts lose the padding that all of a batch have in common (`optimization.trimming`)."""

    def of_pass(self, phase: int, number: int, skip: int = 0) -> "Batches":
        """Return the batches of one pass of a phase, both counted from 0. It decides how images are changed."""
        augmentation = self.augmentation and self.augmentation.derived(phase, number)
        return replace(self, skip=skip, augmentation=augmentation)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch, _ in self.with_labels())

    def with_labels(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with its labels on the CPU, where they are counted without waiting for the device."""
        for batch in stream(self.dataset, self.size, self.generator, self.skip, self.augmentation):
            padding = self.dataset.padding
            rows = trimmed(batch, padding) if self.trims and padding else batch
            there = {name: copied(tensor, self.device) for name, tensor in rows.items()}
            yield finished(self.dataset, there), rows[LABELS]


@dataclass(frozen=True)
class ReadableBatches:
    """The batches of a data set in the stored order, for a choice of blocks by a private task, which no example may
    make fail. An empty batch stands for an example that cannot be read or that is not `known`."""

    dataset: Dataset
    size: int | None
    device: torch.device
    known: Callable[[], Tensor] | None = None
    """A function that returns the mask of examples that may reach the model, bool [examples]. It reads the data, so
    it is called with the first batch."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in stream_readable(self.dataset, self.size, self.known and self.known()):
            there = {name: copied(tensor, self.device) for name, tensor in (batch or {}).items()}
            yield finished(self.dataset, there)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device. A GPU copies from pinned memory, for which this thread does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
