"""Layer scores from gradients of the loss: alternatives to attention for selecting layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tessera.shared.model.blocks import Block, layers_of
from tessera.shared.model.spec import Head
from tessera.worker.attention.profile import batches_of_one
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import rows_of
from tessera.worker.model.forward import evaluation_mode

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], Tensor]

OF_EACH_EXAMPLE = frozenset({"pixel_values", "pixel_attention_mask", "spatial_shapes", "labels"})
"""A contrastive model's inputs with one row per example; its other inputs are the texts of the classes."""


def gradient_norms(
    model: nn.Module, blocks: Sequence[Block], batches: Iterable[Batch], loss: Loss
) -> dict[str, float]:
    """Return, by layer name, the l2 norm of the gradient of the mean loss by the layer's blocks.

    `loss` is the mean over a batch; batches are weighted by their examples. The model runs in evaluation mode and is
    left as it was.
    """
    layered = [block for block in blocks if block.layer is not None]
    with evaluation_mode(model):
        tensors = _needing(model, layered)
        # In 16 bits a sum of many examples no longer grows.
        sums = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in tensors.items()}
        examples = 0
        for batch in batches:
            for name, gradient in _gradients(loss(batch), tensors).items():
                sums[name] += gradient * len(batch["labels"])
            examples += len(batch["labels"])
    return {name: (square**0.5) / max(1, examples) for name, square in _squares(layered, sums).items()}


def fisher(
    model: nn.Module, blocks: Sequence[Block], batches: Iterable[Batch], loss: Loss, head: Head
) -> dict[str, float]:
    """Return, by layer name, the trace of the empirical Fisher information of the layer's blocks.

    It is the mean over examples of the squared l2 norm of the gradient of the example's own loss: one backward pass
    per example. The model runs in evaluation mode and is left as it was.
    """
    layered = [block for block in blocks if block.layer is not None]
    totals = dict.fromkeys((layer.name for layer in layers_of(layered)), 0.0)
    examples = 0
    with evaluation_mode(model):
        tensors = _needing(model, layered)
        for batch in batches:
            for example in batches_of_one(batch, common_to_all(batch, head)):
                for name, square in _squares(layered, _gradients(loss(example), tensors)).items():
                    totals[name] += square
                examples += 1
    return {name: total / max(1, examples) for name, total in totals.items()}


def _needing(model: nn.Module, blocks: Sequence[Block]) -> dict[str, nn.Parameter]:
    """Let only the parameters of these blocks require gradients, and return them by name."""
    wanted = {block.tensor for block in blocks}
    parameters = {name: each for name, each in named_tensors(model).items() if isinstance(each, nn.Parameter)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in wanted)
    return {name: parameter for name, parameter in parameters.items() if name in wanted}


def _gradients(loss: Tensor, tensors: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients by name, without tensors that the loss does not depend on."""
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, [*tensors.values()], allow_unused=True)
    return {name: gradient for name, gradient in zip(tensors, gradients, strict=True) if gradient is not None}


def _squares(blocks: Sequence[Block], gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the squared norm of each layer's gradient, over the layer's own rows of shared tensors."""
    return {
        layer.name: sum(
            _square(block, gradients[block.tensor]) for block in layer.blocks if block.tensor in gradients
        )
        for layer in layers_of(blocks)
    }


def _square(block: Block, gradient: Tensor) -> float:
    if block.part:
        gradient = gradient.index_select(block.part.axis, rows_of(block.part.index(), gradient))
    return float(gradient.float().square().sum())


def common_to_all(batch: Iterable[str], head: Head) -> set[str]:
    """Return the names of a batch's inputs that do not have one row per example."""
    return set(batch) - OF_EACH_EXAMPLE if head == "contrastive" else set()
