"""Outlier scores: the distance of each worker's update from the others, for an administrator.

A score says which update differs and never why: an honest site with unusual data scores like a malicious one.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from statistics import median

import numpy as np

from tessera.shared.methods.base import Update
from tessera.shared.tensors.lazy import PIECE, SteppedTensor, Tensor, lockstep, weighted_steps

PREFIX = "anomaly."
"""Prefix of the names of scores among an update's metrics; no worker may report such a name."""
NORM = f"{PREFIX}norm"
"""The update's l2 norm over the median of the round's."""
DISTANCE = f"{PREFIX}distance"
"""From the merged step, over the median distance of the senders of the same blocks: 1 is usual."""
COSINE = f"{PREFIX}cosine"
"""Of the angle between its step and the merged one, over the blocks that it sent: about 0 is noise, below it is
against the others."""
LEFT_OUT = f"{PREFIX}left_out"
"""1 for an update that was not merged, because of its norm."""

JUDGES = 3
"""Minimum number of updates for which an outlier is defined."""

ABSENT = f"A dash: norms are compared from {JUDGES} updates of a round on; distance and cosine need a robust rule."
"""Explanation of a missing score."""


def median_norm(norms: Mapping[str, float]) -> float:
    """Return the median of the norms; 0 if they are fewer than `JUDGES`."""
    return median(norms.values()) if len(norms) >= JUDGES else 0.0


def relative_norms(norms: Mapping[str, float]) -> dict[str, float]:
    """Return each worker's norm over the median of all; empty where that is zero or the workers are fewer than
    `JUDGES`."""
    middle = median_norm(norms)
    return {worker: norm / middle for worker, norm in norms.items()} if middle > 0 else {}


def scores(
    model: Mapping[str, Tensor], merged: Mapping[str, Tensor], updates: Sequence[Update]
) -> dict[str, dict[str, float]]:
    """Return each worker's distance and cosine. `merged` is the merge of the updates into `model`, before any server
    optimizer.

    Reads the updates once. Undefined scores, such as the cosine with a step of zero, are left out.
    """
    inner, squares, whole, away, usual = ({update.worker: 0.0 for update in updates} for _ in range(5))
    for name, tensor in merged.items():
        base = model[name]
        sent = {update.worker: update.blocks[name] for update in updates if name in update.blocks}
        if not isinstance(tensor, SteppedTensor) or tensor.sources[0] is not base or not sent:
            continue
        of_all, of_each, with_all = _products(
            tensor.step, [weighted_steps(base, [(-1.0, one)]) for one in sent.values()]
        )
        far = [max(0.0, own - 2 * both + of_all) for own, both in zip(of_each, with_all, strict=True)]
        for worker, own, both, distance in zip(sent, of_each, with_all, far, strict=True):
            inner[worker] += both
            squares[worker] += own
            whole[worker] += of_all
            away[worker] += distance
            usual[worker] += median(far)
    return {
        update.worker: {
            **_quotient(DISTANCE, sqrt(away[w]), sqrt(usual[w])),
            **_quotient(COSINE, inner[w], sqrt(squares[w]) * sqrt(whole[w])),
        }
        for update in updates
        for w in [update.worker]
    }


def _products(step: Tensor, steps: Sequence[Tensor]) -> tuple[float, list[float], list[float]]:
    """Return the squared length of `step`, those of `steps`, and the inner products of these with it."""
    of_all, of_each, with_all = 0.0, [0.0] * len(steps), [0.0] * len(steps)
    with np.errstate(over="ignore", invalid="ignore"):
        for whole, *parts in lockstep([step, *steps]):
            for start in range(0, len(whole), PIECE):
                middle = whole[start : start + PIECE]
                of_all += float(np.einsum("i,i", middle, middle))
                for place, part in enumerate(parts):
                    row = part[start : start + PIECE]
                    of_each[place] += float(np.einsum("i,i", row, row))
                    with_all[place] += float(np.einsum("i,i", row, middle))
    return of_all, of_each, with_all


def _quotient(name: str, above: float, below: float) -> dict[str, float]:
    value = above / below if below > 0 else float("nan")
    return {name: value} if isfinite(value) else {}
