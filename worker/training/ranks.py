"""The interface between local training and a rank group: processes that train one model, each on its own device."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, device, nn

from tessera.shared.methods.base import Plan, UnsupportedRun, WorkerHalf
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.training.batches import Batch
from tessera.worker.training.context import LocalTaskContext

T = TypeVar("T")
N = TypeVar("N", float, Tensor)
Pieces = list[tuple[Batch, Any]]
"""The pieces of a batch, each with its share of the batch's loss."""


HOOKS = (
    "private",
    "setup",
    "select",
    "phases",
    "personalization_phases",
    "on_phase_start",
    "loss",
    "after_backward",
)
"""The methods of a worker half that read or change whole tensors, or that not all ranks call together."""


def require_shardable(
    half: WorkerHalf[Any], plan: Plan, blocks: Sequence[Block], training: Training, *, private: bool
) -> None:
    """Raise UnsupportedRun with all reasons why a task's model cannot be divided among devices."""
    trained, fetched = plan.train.resolve(blocks), plan.fetch.resolve(blocks)
    by_tensor = {block.tensor: {each.name for each in blocks if each.tensor == block.tensor} for block in trained}
    whole = {block.name for block in trained}
    sliced = sorted(name for name, parts in by_tensor.items() if not parts <= whole)
    own = [name for name in HOOKS if getattr(type(half), name) is not getattr(WorkerHalf, name)]
    # Refused by `fully_shard` itself, once everything was fetched.
    scalars = sorted(block.name for block in blocks if not block.shape)
    reasons = {
        f"it trains slices of tensors ({', '.join(sliced[:3])}: choose a scope that trains them whole)": sliced,
        f"its method has steps of its own ({', '.join(own)})": own,
        f"its model has parameters of a single number ({', '.join(scalars[:3])})": scalars,
        f"it fetches {len(fetched)} of {len(blocks)} blocks": len(fetched) < len(blocks),
        "it has differential privacy": private,
        "training.keep_moments is true": training.keep_moments,
        "training.precision is float16": training.precision == "float16",
    }
    if found := [reason for reason, true in reasons.items() if true]:
        raise UnsupportedRun(
            f"this worker divides models among its devices (compute.shard), which this run does not allow: "
            f"{'; '.join(found)}. Begin another run, or have the site remove compute.shard"
        )


class Ranks(Protocol):
    """A rank group, as one of its ranks sees it. Each rank makes the same calls in the same order.

    `worker.ranks` implements it.
    """

    @property
    def is_first(self) -> bool:
        """True for one of the ranks."""

    @property
    def shards(self) -> int:
        """The number of ranks among which a model's parameters are divided; 1 if each rank has all of them."""

    def shard(self, model: nn.Module, on: device) -> None:
        """Divide the parameters of a model without storage, if this group does."""

    def keep_shard(self, tensor: Tensor, values: Tensor) -> None:
        """Set a tensor of a divided model to this rank's part of its values."""

    def take_part(self, forward: Callable[[Batch], object], dataset: Dataset, on: device) -> None:
        """Compute a forward pass on a synthetic example if the other ranks, which have rows, wait for this one."""

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
    shards = 1

    def shard(self, model: nn.Module, on: device) -> None:
        pass

    def keep_shard(self, tensor: Tensor, values: Tensor) -> None:
        tensor.detach().copy_(values)

    def take_part(self, forward: Callable[[Batch], object], dataset: Dataset, on: device) -> None:
        pass

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
