"""What makes one prompt of two: a federation's and a site's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.model import Fusion
from worker.configs import ConfigError


class AttentionFusion(nn.Module):
    """What asks plus its multi-head cross-attention to what answers: a + softmax(a Q (b K)^T / sqrt(d)) b V O.

    `d` is the width of a head. The output projection starts at zero, so that it starts as what asks, bit for bit.
    """

    def __init__(self, fusion: Fusion, width: int) -> None:
        super().__init__()
        if width % fusion.heads:
            raise ConfigError(
                f"prompts of width {width} do not divide among {fusion.heads} heads: choose another number"
            )
        self.local_asks = fusion.asks == "local"
        self.attention = nn.MultiheadAttention(width, fusion.heads, batch_first=True)
        for parameter in self.attention.out_proj.parameters():
            nn.init.zeros_(parameter)

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        asks, answers = (local, shared) if self.local_asks else (shared, local)  # [tokens, width] each
        found, _ = self.attention(asks[None], answers[None], answers[None], need_weights=False)
        summed: Tensor = asks + found[0]
        return summed


class MeanFusion(nn.Module):
    """Half of each."""

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        return (shared + local) / 2


class ConcatFusion(nn.Module):
    """One after the other, so that twice as many tokens go in."""

    def forward(self, shared: Tensor, local: Tensor) -> Tensor:
        return torch.cat([shared, local])


def fusion_module(fusion: Fusion, width: int) -> nn.Module:
    """Maps shared prompts [tokens, width] and a site's own to those that go in.

    Raises ConfigError if the width does not divide among the heads.
    """
    if fusion.kind == "attention":
        return AttentionFusion(fusion, width)
    return MeanFusion() if fusion.kind == "mean" else ConcatFusion()
