"""Attention probabilities, a few query rows at a time, from the torch call that computes an attention.

A fused call returns no probabilities: they are recomputed from its queries and keys. A softmax returns them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tessera.worker.errors import UnknownAttention

CHUNK = 1 << 20
"""Number of probabilities computed at a time, 4 MiB of float32; one query row of a batch may need more."""

SOFTMAXES = frozenset({torch.softmax, Tensor.softmax, functional.softmax, torch.special.softmax})


@dataclass(frozen=True)
class Probabilities:
    """The probabilities of one call of an attention, computed on demand, and its sizes."""

    batch: int
    heads: int
    queries: int
    keys: int
    rows: Callable[[int, int], Tensor]
    """A function from `start` and `stop` to the probabilities of these query rows, [batch, heads, rows, keys]."""

    @property
    def rows_at_a_time(self) -> int:
        return max(1, CHUNK // (self.batch * self.heads * self.keys))

    def of_first(self, keys: int) -> Probabilities:
        """Return the probabilities of only the first keys."""
        return replace(self, keys=keys, rows=lambda start, stop: self.rows(start, stop)[..., :keys])


def of_softmax(result: Tensor, examples: int | None, path: str) -> Probabilities:
    """Return the result of a softmax over keys, [batch, heads, queries, keys] or [examples x heads, queries, keys].

    Raises UnknownAttention, naming the attention's `path`, for any other shape.
    """
    if result.ndim == 3 and examples and result.shape[0] % examples == 0:
        result = result.view(examples, -1, *result.shape[1:])
    if result.ndim != 4:
        raise UnknownAttention(
            f"the attention {path} has probabilities of shape {list(result.shape)}, "
            "not [batch, heads, queries, keys]: this layer cannot be measured"
        )
    return _held(result)


def _held(values: Tensor) -> Probabilities:
    batch, heads, queries, keys = values.shape
    return Probabilities(batch, heads, queries, keys, lambda start, stop: values[:, :, start:stop])


def _of_fused(
    query: Tensor,  # [batch, heads, queries, width]
    key: Tensor,  # [batch, key heads, keys, width]
    value: Tensor,  # noqa: ARG001  (torch's signature)
    attn_mask: Tensor | None = None,  # broadcast to [batch, heads, queries, keys]; True marks a visible key
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001  (the shapes show it)
) -> Probabilities:
    """Return float32 probabilities of `scaled_dot_product_attention`, by the definition in torch's documentation."""
    batch, heads, queries, width = query.shape
    keys = key.shape[-2]
    factor = 1 / math.sqrt(width) if scale is None else scale
    turned = key.float().repeat_interleave(heads // key.shape[1], 1).transpose(-1, -2)

    def rows(start: int, stop: int) -> Tensor:
        scores = query[:, :, start:stop].float() @ turned * factor
        if is_causal:
            place = torch.arange(keys, device=query.device)
            scores = scores.masked_fill(place > place[start:stop, None], -math.inf)
        if attn_mask is not None:
            seen = attn_mask[..., start:stop, :] if attn_mask.shape[-2] > 1 else attn_mask
            scores = scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen
        # A query that sees no key has no probabilities.
        return scores.softmax(-1).nan_to_num(0.0)

    return Probabilities(batch, heads, queries, keys, rows)


def _of_multi_head(*args: Any, **kwargs: Any) -> Probabilities:
    """Return the probabilities of torch's own multi-head attention, which computes them at once on request."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.arguments.update(need_weights=True, average_attn_weights=False)
    weights: Any = functional.multi_head_attention_forward(*bound.args, **bound.kwargs)[1]
    return _held(weights)


_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)

READERS: Mapping[Any, Callable[..., Probabilities]] = {
    functional.scaled_dot_product_attention: _of_fused,
    functional.multi_head_attention_forward: _of_multi_head,
}
"""Functions from the arguments of a fused call to its probabilities."""
