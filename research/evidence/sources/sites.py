"""Examples divided among sites with different shares of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
SMALLEST_SHARE = 1e-9


@dataclass(frozen=True)
class Parts:
    """The examples of a site, int64 each: to train on, for the choice of settings, and for the test."""

    train: Indices
    validation: Indices
    test: Indices


def drawn(labels: Indices, sizes: Sequence[int], alpha: float, random: np.random.Generator) -> list[Indices]:
    """Draw examples without return for sites of these sizes. `labels`, [examples], are classes from 0.

    Each site's shares of the classes come from a Dirichlet distribution with `alpha` for each class (Hsu, Qi and
    Brown, "Measuring the effects of non-identical data distribution", 2019, section 3). The sites draw in turn, one
    example each, so that a class which runs out is missed by all alike: its shares then pass to the other classes.
    Raises ValueError if there are fewer examples than the sites need.
    """
    if sum(sizes) > len(labels):
        raise ValueError(
            f"{len(sizes)} sites need {sum(sizes)} examples and there are {len(labels)}: lower one of them"
        )
    pools = [random.permutation(np.flatnonzero(labels == label)).tolist() for label in range(int(labels.max()) + 1)]
    # A small alpha gives shares of exactly zero, and a site must find some example to the end.
    shares = random.dirichlet(np.full(len(pools), alpha), len(sizes)) + SMALLEST_SHARE
    found: list[list[int]] = [[] for _ in sizes]
    for turn in range(max(sizes)):
        for of_site, size, own in zip(found, sizes, shares, strict=True):
            if turn < size:
                left = np.cumsum(own * [bool(pool) for pool in pools])
                label = int(np.searchsorted(left, random.random() * left[-1], side="right"))
                of_site.append(pools[label].pop())
    return [np.array(of_site) for of_site in found]
