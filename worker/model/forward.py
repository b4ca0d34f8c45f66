"""What a model makes of a batch, whatever its head: the one place that knows how each head is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tessera.shared.methods.base import Output
from tessera.shared.model.spec import Head

IGNORED = -100
"""The label of positions that are not scored, in transformers' models and in ours."""


def forward(
    model: nn.Module, head: Head, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None
) -> Output:
    """Return the loss and the logits of a batch that holds the model's keyword inputs, `labels` among them; with
    `values` in place of the model's own tensors of those names.

    A contrastive model is a classifier whose classes are texts: `input_ids` [classes, tokens] beside `pixel_values`
    [examples, ...], and the loss is the cross-entropy of each image's logits over the texts.
    """
    inputs = _fitted(batch, next(model.parameters()).dtype)
    if head != "contrastive":
        output = _called(model, inputs, values)
        return Output(output.loss, output.get("logits"))
    labels = inputs.pop("labels")
    logits: Tensor = _called(model, inputs, values).logits_per_image  # [examples, classes]
    return Output(cross_entropy(logits, labels), logits)


def _fitted(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the batch with pixels and sound in the type of the model's weights: half of the families take no
    other."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() and name != "labels" else tensor
        for name, tensor in batch.items()
    }


def _called(model: nn.Module, inputs: dict[str, Tensor], values: Mapping[str, Tensor] | None) -> Any:
    return model(**inputs) if values is None else functional_call(model, dict(values), (), inputs)


def losses(output: Output, head: Head, labels: Tensor) -> Tensor:
    """Return the loss that each example of a batch has by itself, [examples]; the gradient of one tells of no other.

    The loss that a model reports for a batch of texts will not do: it divides by the tokens of all of them. Raises
    ValueError for a head or labels that this is not known for.
    """
    logits = output.logits
    if logits is None or labels.is_floating_point():
        raise ValueError(f"the losses of single examples are not known for the head {head} with such labels")
    if head == "causal-lm":
        # A position predicts the one after it.
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.ndim == 1:
        return cross_entropy(logits.float(), labels, reduction="none")
    each = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counted = labels != IGNORED  # [examples, positions]
    return each.reshape(labels.shape).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode. Afterwards its modules' modes, what of it needs gradients, and the
    state of torch's random numbers are what they were."""
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
