"""What makes one prompt of two: a federation's and a site's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from tessera.shared.model.spec import Fusion
from tessera.worker.model.config import ConfigError

TINY = 1e-12
"""Keeps the gradient of a length finite where it is zero, as that of the attention's output is at first."""


class AttentionFusion(nn.Module):
    """What asks, a, plus a bounded multi-head cross-attention A to what answers, b.

        X = softmax(N(a) Q (N(b) K)^T / sqrt(d)) N(b) V O
        Y = (X - m) + m |X - m| / sqrt(|X - m|^2 + |m|^2)
        A = Y |a| / sqrt(|a|^2 + |Y|^2)

    N is layer normalisation without gain or bias, d the width of a head, m the mean of X over the tokens that ask, in
    each of their rows, and |.| the l2 norm over all tokens. So prompts attend whatever their size, A is smaller than
    what asks, and what A adds to all tokens alike is smaller than what it adds to each by what that token asks. O
    starts at zero, so that the sum starts as what asks, bit for bit.
    """

    def __init__(self, fusion: Fusion, width: int) -> None:
        super().__init__()
        if width % fusion.heads:
            raise ConfigError(
                f"prompts of width {width} do not divide among {fusion.heads} heads: choose another number"
            )
        self.local_asks = fusion.asks == "local"
        self.heads = fusion.heads
        # Each maps inputs [tokens, width] by x W^T, as the weight of a linear layer does.
        self.query, self.key, self.value = (
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(width, width))) for _ in range(3)
        )
        self.output = nn.Parameter(torch.zeros(width, width))

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        asks, answers = (local, shared) if self.local_asks else (shared, local)  # [tokens, width] each
        found = self._attention(_normalised(asks), _normalised(answers)).float()
        alike = found.mean(dim=0, keepdim=True).expand_as(found)
        by_token = found - alike
        added = _shortened(by_token + _shortened(alike, by_token), asks.float())
        return asks + added.to(asks.dtype)

    def _attention(self, asks: Tensor, answers: Tensor) -> Tensor:
        """X, [asking, width]."""
        # [heads, tokens, width of a head] each
        queries, keys, values = (
            (inputs.to(weight.dtype) @ weight.T).view(len(inputs), self.heads, -1).transpose(0, 1)
            for inputs, weight in ((asks, self.query), (answers, self.key), (answers, self.value))
        )
        weights = (queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).softmax(dim=-1)
        joined: Tensor = (weights.to(values.dtype) @ values).transpose(0, 1).flatten(1)
        return joined @ self.output.T


def _normalised(tokens: Tensor) -> Tensor:
    # Prompts are small: a variance of 0.0004 is usual, and torch's epsilon would count beside it.
    return layer_norm(tokens.float(), tokens.shape[-1:], eps=TINY)


def _shortened(values: Tensor, beside: Tensor) -> Tensor:
    """Return the values at a length below that of what stands beside them; hardly changed where they are much
    shorter."""
    most = beside.square().sum() + TINY
    return values * (most / (most + values.square().sum())).sqrt()


class MeanFusion(nn.Module):
    """Half of each."""

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        return (shared + local) / 2


class ConcatFusion(nn.Module):
    """One after the other, so that twice as many tokens go in."""

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        return torch.cat([shared, local])


def fusion_module(fusion: Fusion, width: int) -> nn.Module:
    """Map shared prompts [tokens, width] and a site's own to those that go in.

    Raises ConfigError if the width does not divide among the heads.
    """
    if fusion.kind == "attention":
        return AttentionFusion(fusion, width)
    return MeanFusion() if fusion.kind == "mean" else ConcatFusion()
