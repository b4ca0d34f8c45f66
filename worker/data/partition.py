"""Dividing one data set among sites, to try a federation out where there is only one."""

from __future__ import annotations

import numpy as np


def dirichlet(labels: np.ndarray, count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """`count` disjoint sets of rows that together are all rows, with label skew: [rows of a site] each, ascending.

    Each class is divided in proportions drawn from Dirichlet(alpha) (Hsu et al. 2019, arXiv 1909.06335, section 2): a
    large alpha makes the sites alike, a small one gives each class to few of them. A site that would be left with
    nothing takes a row from the largest.

    Raises ValueError if there are fewer rows than sites, or `alpha` is not positive.
    """
    if not 1 <= count <= len(labels) or not alpha > 0:
        raise ValueError(f"{len(labels)} rows cannot be divided among {count} sites with alpha {alpha}")
    rng = np.random.default_rng(seed)
    shards: list[list[int]] = [[] for _ in range(count)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(count, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for shard, part in zip(shards, np.split(rows, cuts), strict=True):
            shard.extend(part.tolist())
    for shard in shards:
        if not shard:
            shard.append(max(shards, key=len).pop())
    return [np.sort(np.array(shard, dtype=np.int64)) for shard in shards]
