"""The pieces of a batch that a device computes one after the other, and their shares of the batch's loss."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import structlog
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.spec import Head
from tessera.worker.model.forward import CrossEntropy, label_count
from tessera.worker.training.batches import Batch

MicroBatch = int | Literal["auto"] | None
"""Number of examples in a forward and backward pass: a whole batch if None, as many as fit if `auto`."""


class ExampleTooLarge(torch.OutOfMemoryError):
    """A single example for which the device has too little memory."""


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
        return [(batch, 1.0)]
    # The mean loss of a piece without labels is not a number.
    labelled = [(piece, count) for piece, count in zip(pieces, counts, strict=True) if count]
    if objective is None or objective.class_weights is None:
        return [(piece, count / whole) for piece, count in labelled]
    weights = torch.stack([objective.weight_of(head, piece["labels"]) for piece, _ in labelled])
    return [(piece, share) for (piece, _), share in zip(labelled, weights / weights.sum(), strict=True)]


def require_additive(
    model: nn.Module, labels: Tensor, size: int | None, *, loss_by_example: bool, weighted: bool = False
) -> None:
    """Raise UnsupportedRun if the losses of a batch's pieces do not add up to the batch's. `weighted`: whether
    classes have weights."""
    if size is None or len(labels) <= size:
        return
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        raise UnsupportedRun(
            f"this worker trains batches in pieces of {size} examples (micro_batch), and the model has batch "
            f"normalisation, which needs whole batches: begin a run with a training.batch_size of at most {size}"
        )
    if loss_by_example and (labels.ndim > 1 or weighted):
        raise UnsupportedRun(
            f"this worker trains batches in pieces of {size} examples (micro_batch), whose losses do not add up "
            "to the batch's by this method where an example has several labels or classes have weights: begin a run "
            f"with a training.batch_size of at most {size}, or with another method"
        )
