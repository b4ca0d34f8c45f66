"""What a site's data look like to the training loop, and what an adapter for a kind of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shared.blocks import Frozen

LABELS = "labels"


class DataError(ValueError):
    """A data set cannot be used: its kind is not known, its options are wrong, or its file is."""


class Options(Frozen):
    """An adapter's own options, as the settings file gives them; unknown ones are refused."""


class Dataset:
    """Examples in memory: each tensor is one of the model's keyword inputs, [examples, ...].

    Raises DataError if the tensors differ in their number of examples, have none, or `labels` is not among them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if LABELS not in tensors:
            raise DataError(f"there is no tensor {LABELS!r} among {', '.join(sorted(tensors)) or 'none at all'}")
        sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in sorted(tensors.items())}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise DataError(f"every tensor must have the same leading size, and one above 0: {sizes}")
        self.tensors = dict(tensors)
        self.examples = sizes[LABELS]

    def batches(
        self, batch_size: int | None, generator: torch.Generator | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yields every example once, `batch_size` at a time (None: all at once), the last batch perhaps smaller.

        In the stored order, or in one drawn from `generator`.
        """
        order = (
            torch.arange(self.examples) if generator is None else torch.randperm(self.examples, generator=generator)
        )
        for rows in torch.split(order, batch_size or self.examples):
            yield {name: tensor[rows] for name, tensor in self.tensors.items()}


O = TypeVar("O", bound=Options)  # noqa: E741  (the field's letter for options)


@dataclass(frozen=True)
class Adapter(Generic[O]):
    """A kind of data set, as its file declares it in `ADAPTER`."""

    kind: str
    options: type[O]
    open: Callable[[O], Dataset]
    """Raises DataError."""
