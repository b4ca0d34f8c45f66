"""The forward pass and the losses of each kind of head."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tessera.shared.methods.base import Output
from tessera.shared.model.spec import Head
from tessera.shared.run_settings import Training

IGNORED = -100
"""Label of positions that the loss ignores, in transformers' models and in ours."""


@dataclass(frozen=True)
class CrossEntropy:
    """A cross entropy with integer labels that replaces the model's own loss, which has neither of these settings."""

    label_smoothing: float = 0.0
    """Share of a label's weight that all classes have equally (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""

    def of(self, logits: Tensor, head: Head, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Return the loss of `logits` [examples, classes] or [examples, positions, classes]: the mean over all labels
        that count, or with the reduction `none` that of each label, in the shape that `labels` have for the head.

        Raises ValueError for labels that are not integers.
        """
        if labels.is_floating_point():
            raise ValueError(f"a cross entropy of classes needs integer labels: the head {head} has {labels.dtype}")
        if head == "causal-lm":
            # A position predicts the one after it.
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = cross_entropy(
            logits.float().flatten(0, -2),
            labels.flatten(),
            reduction=reduction,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
        return each.reshape(labels.shape) if reduction == "none" else each


def objective_of(training: Training) -> CrossEntropy | None:
    """Return the training loss that a run's settings ask for; None for the model's own."""
    return CrossEntropy(training.label_smoothing) if training.label_smoothing else None


def forward(
    model: nn.Module,
    head: Head,
    batch: Mapping[str, Tensor],
    values: Mapping[str, Tensor] | None = None,
    objective: CrossEntropy | None = None,
) -> Output:
    """Return the loss and logits of a batch of the model's keyword inputs, which include `labels`.

    `values` replace the model's tensors of the same names; an `objective` replaces its own loss. A contrastive model
    is a classifier whose classes are texts: beside `pixel_values` [examples, ...] it takes `input_ids` [classes,
    tokens], and its loss is the cross-entropy of each image's logits over the texts.
    """
    # Half of the families require pixels and sound in the dtype of the weights.
    dtype = next(model.parameters()).dtype
    inputs = {
        name: tensor.to(dtype) if tensor.is_floating_point() and name != "labels" else tensor
        for name, tensor in batch.items()
    }
    # Some models make the inputs of their decoder from the labels.
    ours = head == "contrastive" or (objective is not None and head != "seq2seq-lm")
    labels = inputs.pop("labels") if ours else None
    output: Any = model(**inputs) if values is None else functional_call(model, dict(values), (), inputs)
    if objective:
        return Output(objective.of(output.logits, head, batch["labels"]), output.logits)
    if labels is None:
        return Output(output.loss, output.get("logits"))
    logits: Tensor = output.logits_per_image  # [examples, classes]
    return Output(cross_entropy(logits, labels), logits)


def label_count(head: Head, labels: Tensor) -> int:
    """Return the number of labels over which the model's own loss of a batch is the mean."""
    if labels.ndim < 2 or labels.is_floating_point():
        return len(labels)
    if head == "causal-lm":
        # A position predicts the one after it.
        labels = labels[:, 1:]
    return int((labels != IGNORED).sum())


def losses(output: Output, head: Head, labels: Tensor, objective: CrossEntropy | None = None) -> Tensor:
    """Return the loss of each example of a batch, [examples], each independent of the other examples.

    The model's own loss is not the mean of these for texts: it divides by the tokens of the whole batch. Raises
    ValueError for a head without logits and for floating-point labels.
    """
    logits = output.logits
    if logits is None or labels.is_floating_point():
        raise ValueError(
            f"per-example losses need logits and integer labels: the head {head} has "
            f"{'no logits' if logits is None else f'labels of {labels.dtype}'}"
        )
    each = (objective or CrossEntropy()).of(logits, head, labels, "none")
    if each.ndim == 1:
        return each
    counted = (labels[:, 1:] if head == "causal-lm" else labels) != IGNORED  # [examples, positions]
    return each.sum(dim=1) / counted.sum(dim=1).clamp(min=1)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. On exit, restore its modules' modes, its parameters' `requires_grad` and
    torch's random state."""
    modes = [(module, module.training) for module in model.modules()]
    needs = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    devices = sorted({parameter.device.index for parameter, _ in needs if parameter.is_cuda})
    model.train(mode=False)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, needed in needs:
            parameter.requires_grad_(needed)
