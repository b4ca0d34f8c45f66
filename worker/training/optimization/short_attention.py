"""Attention over few keys in bfloat16 on the CPU, without torch's fused kernel.

The backward pass of the fused kernel takes several times as long as products of matrices, unless keys are many: 8
times at 24 keys, and 1.7 times at 128.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tessera.shared.run_settings import Training
from tessera.worker.training.optimization.precision import half_of

MOST_KEYS = 128
"""The most keys for which the fused kernel is slower."""


def short_attention(training: Training, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which passes in bfloat16 on the CPU compute attention over few keys by products.

    It holds for this thread. Results differ by rounding.
    """
    return _Unfused() if device.type == "cpu" and half_of(training, device) else nullcontext()


class _Unfused(TorchFunctionMode):
    """Replaces the fused call where it is slow."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is functional.scaled_dot_product_attention and _is_slow(*args, **options):
            return attention(*args, **options)
        return func(*args, **options)


def _is_slow(query: Tensor, key: Tensor, *rest: object, **options: object) -> bool:
    """Return True if there is a backward pass in which the fused kernel would be slow."""
    del query, rest, options
    return key.shape[-2] <= MOST_KEYS and torch.is_grad_enabled()


def attention(
    query: Tensor,  # [..., heads, queries, width]
    key: Tensor,  # [..., key heads, keys, width]
    value: Tensor,  # [..., key heads, keys, value width]
    attn_mask: Tensor | None = None,  # broadcast to [..., heads, queries, keys]; True marks a visible key
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention`, by the definition in torch's documentation; softmax is in float32.

    A query that sees no key, as of padding, sees all alike.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor @ key.transpose(-1, -2)).float()
    hidden = torch.finfo(scores.dtype).min
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), hidden)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, hidden) if attn_mask.dtype == torch.bool else scores + attn_mask
    probabilities = functional.dropout(scores.softmax(-1).to(value.dtype), dropout_p)
    return probabilities @ value
