"""Sparse weighted averaging: each block over the workers that sent it.

McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1, block by block. Steps, not weights, are averaged: a block that a
worker did not send says 'no change' rather than zero, and a block that nobody sent keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from shared.tensors import Tensor, mean_step

Divide = Literal["participants", "cohort"]
"""Who a block's step is divided by: the workers that sent it, or all whose update was accepted."""


def average(
    model: Mapping[str, Tensor], senders: Sequence[tuple[float, Mapping[str, Tensor]]], divide: Divide
) -> dict[str, Tensor]:
    """The blocks that somebody sent, averaged with each sender's weight.

    `participants` divides a block's step by the weights of those who sent it: full-size steps for rare blocks.
    `cohort` divides by the weights of all senders: linear and of bounded sensitivity, damped by the share that sent.
    """
    whole = sum(weight for weight, _ in senders) if divide == "cohort" else None
    sent = {name: [(weight, blocks[name]) for weight, blocks in senders if name in blocks] for name in model}
    return {name: mean_step(model[name], those, whole) for name, those in sent.items() if those}
