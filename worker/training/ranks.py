"""The interface between local training and a rank group: processes that train one model, each on its own device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, device, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from tessera.shared.methods.base import Plan, UnsupportedRun, WorkerHalf
from tessera.shared.model.spec import Head, Model
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.model.config import config_from
from tessera.worker.model.forward import one_for_each
from tessera.worker.training.batches import Batch
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.micro_batch import not_additive

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


def require_summable(half: WorkerHalf[Any], context: LocalTaskContext, dataset: Dataset, ranks: int) -> None:
    """Raise UnsupportedRun if the losses of a batch's rows, which `ranks` divide, do not add up to the batch's."""
    labels = dataset.inputs[LABELS]
    several = len(labels.shape) > 1 and not labels.dtype.is_floating_point
    several |= isinstance(labels, Tensor) and not one_for_each(labels)
    normalises = any(isinstance(module, _BatchNorm) for module in context.model.modules())
    if fault := not_additive(half, context.training, normalises=normalises, several=several):
        reason, other = fault
        raise UnsupportedRun(
            f"this worker divides batches among {ranks} devices, and {reason}: begin a run with another {other}, or "
            "have the site train on one device (devices)"
        )


def require_shardable(half: WorkerHalf[Any], plan: Plan, model: Model, training: Training, *, private: bool) -> None:
    """Raise UnsupportedRun with all reasons why a task's model cannot be divided among devices."""
    blocks = model.blocks
    trained, fetched = plan.train.resolve(blocks), plan.fetch.resolve(blocks)
    by_tensor = {block.tensor: {each.name for each in blocks if each.tensor == block.tensor} for block in trained}
    whole = {block.name for block in trained}
    sliced = sorted(name for name, parts in by_tensor.items() if not parts <= whole)
    own = [name for name in HOOKS if getattr(type(half), name) is not getattr(WorkerHalf, name)]
    if not half.beyond_training(half.settings):
        # With these settings its hooks do nothing.
        own = []
    # Refused by `fully_shard` itself, once everything was fetched.
    scalars = sorted(block.name for block in blocks if not block.shape)
    # Each rank would skip others, and gather those that it does not skip.
    skipping = sorted(_layer_drops(config_from(model.config).to_dict()))
    reasons = {
        f"it trains slices of tensors ({', '.join(sliced[:3])}: choose a scope that trains them whole)": sliced,
        f"its method has steps of its own ({', '.join(own)})": own,
        f"its model has parameters of a single number ({', '.join(scalars[:3])})": scalars,
        f"its model skips layers at random ({', '.join(skipping)})": skipping,
        f"it fetches {len(fetched)} of {len(blocks)} blocks": len(fetched) < len(blocks),
        "its method measures attention": bool(half.settings.probe_examples),
        "it has differential privacy": private,
        "training.keep_moments is true": training.keep_moments,
        'training.loss is "dpo"': training.loss is not None,
        "training.precision is float16": training.precision == "float16",
    }
    if found := [reason for reason, true in reasons.items() if true]:
        raise UnsupportedRun(
            f"this worker divides models among its devices (compute.shard), which this run does not allow: "
            f"{'; '.join(found)}. Begin another run, or have the site remove compute.shard"
        )


def _layer_drops(config: Mapping[str, Any]) -> set[str]:
    """Return the settings of a model's config, or of its parts, that skip whole layers in training."""
    parts = [_layer_drops(part) for part in config.values() if isinstance(part, dict)]
    return set().union(
        *parts, (str(name) for name, value in config.items() if str(name).endswith("layerdrop") and value)
    )


class Ranks(Protocol):
    """A rank group, as one of its ranks sees it. Each rank makes the same calls in the same order.

    `worker.executor` implements it.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

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

    def context(self, context: LocalTaskContext) -> LocalTaskContext:
        """Return the context whose measurements are the same in each rank."""

    def take_part(self, model: PreTrainedModel, head: Head, dataset: Dataset) -> None:
        """Compute a forward pass on a synthetic example if the other ranks, which have rows, wait for this one."""

    def share_of(self, dataset: Dataset) -> Dataset:
        """Return the data set with this rank's rows of each batch."""

    def start_phase(self, parameters: Sequence[Tensor]) -> None:
        """Give the parameters the first rank's values, and each rank randomness of its own."""

    def examples(self, count: int) -> int:
        """Return the sum of the ranks' numbers of examples."""

    def weigh(self, pieces: Pieces, labels: Tensor, context: LocalTaskContext) -> Pieces:
        """Return the pieces of this rank's rows with their shares of the whole batch's loss."""

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the parameters' gradients by their sums over the ranks."""

    def rows(self, rows: Tensor) -> Tensor:
        """Return this rank's part of the places of a sample's examples."""

    def total(self, value: N) -> N:
        """Return the sum of the ranks' values, of a tensor on its device."""

    def any_rank(self, true: bool) -> bool:
        """Return True if it is true in a rank."""

    def same(self, compute: Callable[[], T]) -> T:
        """Return the result of the first rank's computation, or raise its exception."""

    def shared(self, make: Callable[[], Dataset]) -> Dataset:
        """Return the data set that the first rank makes."""


class OneRank:
    """A single process, whose batches are whole."""

    size = shards = 1
    is_first = True

    def shard(self, model: nn.Module, on: device) -> None:
        pass

    def keep_shard(self, tensor: Tensor, values: Tensor) -> None:
        tensor.detach().copy_(values)

    def context(self, context: LocalTaskContext) -> LocalTaskContext:
        return context

    def take_part(self, model: PreTrainedModel, head: Head, dataset: Dataset) -> None:
        pass

    def share_of(self, dataset: Dataset) -> Dataset:
        return dataset

    def start_phase(self, parameters: Sequence[Tensor]) -> None:
        pass

    def examples(self, count: int) -> int:
        return count

    def weigh(self, pieces: Pieces, labels: Tensor, context: LocalTaskContext) -> Pieces:
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

    def shared(self, make: Callable[[], Dataset]) -> Dataset:
        return make()
