"""Sparse weighted averaging: each block over the workers that sent it.

McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1, block by block. Steps, not weights, are averaged: a block that a
worker did not send says 'no change' rather than zero, and a block that nobody sent keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.tensors import Tensor, mean_step

if TYPE_CHECKING:
    from shared.methods.contract import Divide, State, Update


def average(state: State, updates: Sequence[Update], divide: Divide) -> State:
    """The state after one round of example-weighted averaging.

    `participants` divides a block's step by the weights of those who sent it: full-size steps for rare blocks.
    `cohort` divides by the weights of all updates: linear and of bounded sensitivity, damped by the share that sent.
    """
    whole = float(sum(update.examples for update in updates)) if divide == "cohort" else None
    changed: dict[str, Tensor] = {}
    for name, base in state.model.items():
        senders = [(float(update.examples), update.blocks[name]) for update in updates if name in update.blocks]
        if senders:
            changed[name] = mean_step(base, senders, whole)
    return state.advanced(changed)
