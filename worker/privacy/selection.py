"""Noisy choices of the largest of some sums over the examples, or over groups of examples."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.groups import Groups
from tessera.worker.training.batches import Batch

SCORE_BITS = 30
"""A score is a multiple of 2^-30: the sums of such numbers are exact in float64."""


@dataclass(frozen=True)
class WatchedBatches:
    """Batches that call `look` when they are read."""

    batches: Iterable[Batch]
    look: Callable[[], None]

    def __iter__(self) -> Iterator[Batch]:
        self.look()
        return iter(self.batches)


def bounded_sums(scores: Array, groups: Groups | None = None) -> Array:
    """Return the sums over the examples, float64 [candidates], of scores [examples, candidates] clipped to [0, 1].

    With `groups`, they are the sums of each group's mean. So adding an example, or a group, increases each sum by at
    most 1 and decreases none. A score of nan counts as 0. Scores and means are rounded to multiples of 2^-30, so that
    the order of the examples has no effect. Raises ValueError unless there is a score for each example of the groups.
    """
    bounded = np.nan_to_num(scores.astype(np.float64)).clip(0, 1)
    rounded = np.rint(np.ldexp(bounded, SCORE_BITS))
    if groups is not None:
        if len(rounded) != len(groups.members):
            raise ValueError(f"{len(rounded)} scores for {len(groups.members)} examples, of which each has a group")
        totals = torch.zeros(groups.count, rounded.shape[1], dtype=torch.float64)
        totals.index_add_(0, groups.numbers, torch.from_numpy(rounded))
        rounded = np.rint(totals.numpy() / groups.sizes.numpy()[:, None])
    sums: Array = np.ldexp(rounded.sum(axis=0), -SCORE_BITS)
    return sums


def epsilon_per_pick(rho: float, count: int) -> float:
    """Return the epsilon of each of `count` picks that are `rho`-zCDP together."""
    return float(np.sqrt(8 * rho / count))


def private_top_k(sums: Array, count: int, epsilon_per_pick: float, source: NoiseSource) -> list[int]:
    """Return the places of the `count` largest of noisy sums [candidates], largest first.

    Adding an example must change each sum by at most 1, and all of them in the same direction. Picking by one draw of
    Gumbel noise of scale 1/epsilon equals repeated use of the exponential mechanism (Durfee and Rogers 2019, arXiv
    1905.04273), and each pick is epsilon^2/8-zCDP (Cesar and Rogers 2021, arXiv 2004.07223).
    """
    noisy = sums + source.gumbel(len(sums)) / epsilon_per_pick
    return [int(place) for place in np.argsort(-noisy)[:count]]
