"""Gradient checkpointing: activations that the backward pass computes again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from tessera.shared.methods.base import UnsupportedRun


@contextmanager
def recomputed(
    model: PreTrainedModel, again: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Keep only the inputs of a model's layers within the block, and compute the rest again for the backward pass.

    `again` makes a context for that: the caller's own, if one changes how the first pass is computed. Gradients have
    the same bits: dropout is drawn again from the same state, and running statistics move once. Raises
    UnsupportedRun for a model without layers that transformers can compute again.
    """
    # Newer versions of transformers 5 warn of the older name.
    options = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _without_statistics(model, again))}
    what = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    try:
        getattr(model, f"{what}_checkpointing_enable")(options)
    except ValueError as fault:
        raise UnsupportedRun(
            f"training.gradient_checkpointing is true, but a model of the type {model.config.model_type!r} has no "
            "layers that can be computed again: leave it out"
        ) from fault
    # transformers lets gradients reach the embeddings, which only the reentrant way needs: frozen layers would cost a
    # backward pass, and the hook that is left would keep the model from being used again in the next round.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        getattr(model, f"{what}_checkpointing_disable")()


@contextmanager
def _without_statistics(model: nn.Module, again: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let batches within the block and `again` move no running statistics."""
    norms = [(module, module.momentum) for module in model.modules() if isinstance(module, _BatchNorm)]
    for module, _ in norms:
        module.momentum = 0.0
    try:
        with again():
            yield
    finally:
        for module, momentum in norms:
            module.momentum = momentum
