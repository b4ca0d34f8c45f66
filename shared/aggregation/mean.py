"""Sparse weighted averaging: each block over the workers that sent it.

McMahan et al. 2017 (arXiv 1602.05629), Algorithm 1, block by block. Steps, not weights, are averaged: a block that a
worker did not send means 'no change' rather than zero, and a block that no worker sent keeps its bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from tessera.shared.tensors.lazy import Tensor, mean_step
from tessera.shared.tensors.statistics import is_statistic

Normalization = Literal["participants", "cohort", "inverse-probability"]
"""Denominator of a block's step: the weight of the workers that sent it, the weight of all accepted updates, or the
latter times the probability that a worker sends the block."""


def average(
    model: Mapping[str, Tensor],
    senders: Sequence[tuple[float, Mapping[str, Tensor]]],
    normalization: Normalization,
    inclusion: Callable[[str], float] = lambda _: 1.0,
    weights: Sequence[Mapping[str, float]] = (),
) -> dict[str, Tensor]:
    """Return the blocks that at least one worker sent, averaged with each sender's weight, or with its weight in
    `weights` for a block that is named there.

    `participants` divides a block's step by the weights of those who sent it: full-size steps for rare blocks, with a
    random denominator. `cohort` divides by the weights of all senders: linear and of bounded sensitivity, damped by
    the share that sent. `inverse-probability` divides by the weights of all senders times the block's `inclusion`
    (Horvitz and Thompson 1952): over random selections with that probability, the expected step is that of a round in
    which all workers send the block. Running statistics are averaged by `participants` then. If all workers send all
    blocks, the three agree.

    Raises ValueError for an inclusion that is not in (0, 1], of a block that was sent.
    """
    accepted = sum(weight for weight, _ in senders)

    def whole(name: str) -> float | None:
        match normalization:
            case "cohort":
                return accepted
            case "inverse-probability" if not is_statistic(name):
                return accepted * _probability(name, inclusion(name))
        return None

    own = weights or [{}] * len(senders)
    sent = {
        name: [
            (of_blocks.get(name, weight), blocks[name])
            for (weight, blocks), of_blocks in zip(senders, own, strict=True)
            if name in blocks
        ]
        for name in model
    }
    return {name: mean_step(model[name], those, whole(name)) for name, those in sent.items() if those}


def _probability(name: str, chance: float) -> float:
    if not 0 < chance <= 1:
        raise ValueError(f"block {name!r} was sent, so the probability of that is in (0, 1] and not {chance}")
    return chance
