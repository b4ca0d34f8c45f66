"""How the loss depends on each layer: what attention is held against as a way to choose layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from tessera.shared.model.blocks import Block, layers_of
from tessera.shared.model.spec import Head
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import rows_of
from tessera.worker.model.forward import measuring

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], Tensor]

OF_EACH_EXAMPLE = frozenset({"pixel_values", "pixel_attention_mask", "spatial_shapes", "labels"})
"""What a contrastive model is given for each example: the texts beside them name its classes."""


def gradient_norms(
    model: nn.Module, blocks: Sequence[Block], batches: Iterable[Batch], loss: Loss
) -> dict[str, float]:
    """Return the l2 norm of the gradient of the mean loss by the blocks of each layer, by the layer's name.

    `loss` is the mean over a batch; batches count by their examples. The model is evaluated (no dropout) and left as
    it was.
    """
    layered = [block for block in blocks if block.layer is not None]
    with measuring(model):
        tensors = _needing(model, layered)
        sums = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        examples = 0
        for batch in batches:
            for name, gradient in _gradients(loss(batch), tensors).items():
                sums[name] += gradient * _examples(batch)
            examples += _examples(batch)
    return {name: (square**0.5) / max(1, examples) for name, square in _squares(layered, sums).items()}


def fisher(
    model: nn.Module, blocks: Sequence[Block], batches: Iterable[Batch], loss: Loss, head: Head
) -> dict[str, float]:
    """Return the trace of the empirical Fisher information by the blocks of each layer, by the layer's name.

    That is the mean over examples of the squared l2 norm of the gradient of the example's own loss: one backward pass
    for each. The model is evaluated (no dropout) and left as it was.
    """
    layered = [block for block in blocks if block.layer is not None]
    totals = dict.fromkeys((layer.name for layer in layers_of(layered)), 0.0)
    examples = 0
    with measuring(model):
        tensors = _needing(model, layered)
        for batch in batches:
            for example in _one_by_one(batch, head):
                for name, square in _squares(layered, _gradients(loss(example), tensors)).items():
                    totals[name] += square
                examples += 1
    return {name: total / max(1, examples) for name, total in totals.items()}


def _needing(model: nn.Module, blocks: Sequence[Block]) -> dict[str, nn.Parameter]:
    """Return the parameters that the blocks are in, by name, and no others, made to need gradients."""
    wanted = {block.tensor for block in blocks}
    found: dict[str, nn.Parameter] = {}
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(name in wanted)
            if name in wanted:
                found[name] = tensor
    return found


def _gradients(loss: Tensor, tensors: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """By name; without those that the loss does not depend on."""
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, [*tensors.values()], allow_unused=True)
    return {name: gradient for name, gradient in zip(tensors, found, strict=True) if gradient is not None}


def _squares(blocks: Sequence[Block], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the squared norm of each layer's gradient, over the layer's own rows of the tensors that it shares."""
    squares: dict[str, float] = {}
    for layer in layers_of(blocks):
        squares[layer.name] = sum(
            _square(block, gradients[block.tensor]) for block in layer.blocks if block.tensor in gradients
        )
    return squares


def _square(block: Block, gradient: Tensor) -> float:
    if block.part:
        gradient = gradient.index_select(block.part.axis, rows_of(block.part.index(), gradient))
    return float(gradient.float().square().sum())


def _examples(batch: Batch) -> int:
    return len(batch["labels"])


def _one_by_one(batch: Batch, head: Head) -> Iterator[Batch]:
    whole = common_to_all(batch, head)
    for row in range(_examples(batch)):
        yield {name: tensor if name in whole else tensor[row : row + 1] for name, tensor in batch.items()}


def common_to_all(batch: Iterable[str], head: Head) -> set[str]:
    """Return those of a batch's inputs that belong to no example."""
    return set(batch) - OF_EACH_EXAMPLE if head == "contrastive" else set()
