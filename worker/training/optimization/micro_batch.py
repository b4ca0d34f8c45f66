"""The pieces of a batch that a device computes one after the other, and their shares of the batch's loss."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tessera.shared.methods.base import WorkerHalf
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Head
from tessera.shared.run_settings import Training
from tessera.worker.compute import MicroBatch
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.errors import ExampleTooLarge, Indivisible
from tessera.worker.model.forward import CrossEntropy, label_count, one_for_each
from tessera.worker.training.batches import Batch


@dataclass
class PieceSize:
    """The number of examples in a forward and backward pass. If it is automatic, it is halved when memory runs out,
    and stays so for the run."""

    examples: int | None
    automatic: bool = False

    @classmethod
    def of(cls, setting: MicroBatch) -> "PieceSize":
        """Return the size at the start of a run."""
        return cls(None, automatic=True) if setting == "auto" else cls(setting)

    def of_batches(self, batch_size: int | None, ranks: int = 1) -> int | None:
        """Return the number of examples of a batch, for passes whose result does not depend on it. Each of several
        ranks computes its share."""
        most = self.examples and self.examples * ranks
        return min((size for size in (batch_size, most) if size), default=None)

    def halve(self, batch: int) -> None:
        """Halve the size, after memory ran out in a batch of `batch` examples. Raises ExampleTooLarge."""
        present = min(self.examples or batch, batch)
        if present == 1:
            raise ExampleTooLarge(
                "one example does not fit into this worker's memory beside the model: begin a run with a smaller "
                "model, with shorter inputs, or with a method that trains fewer blocks"
            )
        self.examples = present // 2
        structlog.get_logger("worker").info("micro-batch-halved", examples=self.examples)


def pieces_of(
    batch: Batch,
    labels: Tensor,
    size: int | None,
    head: Head,
    common: Collection[str] = (),
    objective: CrossEntropy | None = None,
) -> list[tuple[Batch, float | Tensor]]:
    """Return the batch in pieces of `size` examples, each with its share of the batch's labels, or of their weights,
    by which its mean loss counts. `labels` are the batch's on the CPU; `common` are the inputs that have no row for
    each example."""
    if size is None or len(labels) <= size:
        return [(batch, 1.0)]
    cut = {name: torch.split(tensor, size) for name, tensor in batch.items() if name not in common}
    whole_of = {name: batch[name] for name in common}
    pieces = [{**dict(zip(cut, parts, strict=True)), **whole_of} for parts in zip(*cut.values(), strict=True)]
    counts = [label_count(head, part) for part in torch.split(labels, size)]
    whole = sum(counts)
    if not whole:
        # The loss of each piece is 0; a term that a method adds to it is a mean over the examples.
        parts = torch.split(labels, size)
        return [(piece, len(part) / len(labels)) for piece, part in zip(pieces, parts, strict=True)]
    # The mean loss of a piece without labels is not a number.
    labelled = [(piece, count) for piece, count in zip(pieces, counts, strict=True) if count]
    if objective is None or objective.class_weights is None:
        return [(piece, count / whole) for piece, count in labelled]
    weights = torch.stack([objective.weight_of(head, piece["labels"]) for piece, _ in labelled])
    return [(piece, share) for (piece, _), share in zip(labelled, weights / weights.sum(), strict=True)]


def require_divisible(
    half: WorkerHalf[Any], blocks: Iterable[Block], dataset: DatasetInfo, training: Training, size: MicroBatch
) -> None:
    """Raise Indivisible, before anything is fetched, if a task's batches would be trained in pieces of `size`
    examples whose losses do not add up to the batch's."""
    if isinstance(size, int):
        batch = min(training.batch_size or dataset.examples, dataset.examples)
        normalises = any(block.tensor.endswith(".running_mean") for block in blocks)
        _require(size, batch, not_additive(half, training, normalises=normalises, several=dataset.several_labels))


def require_additive(
    model: nn.Module, half: WorkerHalf[Any], labels: Tensor, training: Training, size: int | None
) -> None:
    """Raise Indivisible if the losses of the pieces of a batch with these labels do not add up to the batch's."""
    if size is not None and len(labels) > size:
        normalises = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
        several = not one_for_each(labels)
        _require(size, len(labels), not_additive(half, training, normalises=normalises, several=several))


def not_additive(
    half: WorkerHalf[Any], training: Training, *, normalises: bool, several: bool
) -> tuple[str, str] | None:
    """Return the reason for which the losses of a batch's parts do not add up to its loss, and the part of a run to
    change; None if they do. `several` if an example may have several labels, or none."""
    if normalises:
        return "the model has batch normalisation, which needs whole batches", "model"
    if half.loss_by_example and (several or training.class_weights is not None):
        return (
            "by this method the losses of its parts do not add up where an example has several labels or none, or "
            "classes have weights"
        ), "method"
    return None


def _require(size: int, batch: int, fault: tuple[str, str] | None) -> None:
    if batch > size and fault:
        reason, other = fault
        raise Indivisible(
            f"this worker trains batches in pieces of {size} examples (micro_batch), and {reason}: begin a run with "
            f"a training.batch_size of at most {size}, or with another {other}"
        )
