"""The interface between local training and a rank group: processes that train one model, each on its own device."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from tessera.worker.data.dataset import Dataset
from tessera.worker.training.batches import Batch
from tessera.worker.training.context import LocalTaskContext

T = TypeVar("T")
N = TypeVar("N", float, Tensor)
Pieces = list[tuple[Batch, Any]]
"""The pieces of a batch, each with its share of the batch's loss."""


class Ranks(Protocol):
    """A rank group, as one of its ranks sees it. Each rank makes the same calls in the same order.

    `worker.ranks` implements it.
    """

    @property
    def is_first(self) -> bool:
        """True for one of the ranks."""

    def share_of(self, dataset: Dataset) -> Dataset:
        """Return the data set with this rank's rows of each batch."""

    def start_phase(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Give the parameters the first rank's values. Raises UnsupportedRun for a model that needs whole batches."""

    def examples(self, count: int) -> int:
        """Return the sum of the ranks' numbers of examples."""

    def weigh(self, pieces: Pieces, labels: Tensor, context: LocalTaskContext, *, loss_by_example: bool) -> Pieces:
        """Return the pieces of this rank's rows with their shares of the whole batch's loss. Raises UnsupportedRun
        for losses that do not add up."""

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the parameters' gradients by their sums over the ranks."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return this rank's ones of the places of a sample's examples."""

    def total(self, value: N) -> N:
        """Return the sum of the ranks' values, of a tensor on its device."""

    def any_rank(self, true: bool) -> bool:
        """Return whether it is true in a rank."""

    def same(self, compute: Callable[[], T]) -> T:
        """Return what the first rank computes, or raise what it raises."""


class OneRank:
    """A single process, whose batches are whole."""

    is_first = True

    def share_of(self, dataset: Dataset) -> Dataset:
        return dataset

    def start_phase(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        pass

    def examples(self, count: int) -> int:
        return count

    def weigh(self, pieces: Pieces, labels: Tensor, context: LocalTaskContext, *, loss_by_example: bool) -> Pieces:
        return pieces

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        pass

    def rows(self, rows: Tensor) -> Tensor:
        return rows

    def total(self, value: N) -> N:
        return value

    def any_rank(self, true: bool) -> bool:
        return true

    def same(self, compute: Callable[[], T]) -> T:
        return compute()
