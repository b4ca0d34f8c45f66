"""Dividing one data set among sites, to try a federation out where there is only one.

Each scheme gives `count` disjoint sets of rows that together are all rows, [rows of a site] each and ascending, none
of them empty, and the same ones for the same seed. Each raises ValueError for what cannot be divided so.
"""

from __future__ import annotations

import numpy as np


def iid(rows: int, count: int, seed: int) -> list[np.ndarray]:
    """Return rows at random, as many at each site as at any other, give or take one."""
    if not 1 <= count <= rows:
        raise ValueError(f"{rows} rows cannot be divided among {count} sites")
    order = np.random.default_rng(seed).permutation(rows)
    return [np.sort(part) for part in np.array_split(order, count)]


def dirichlet(labels: np.ndarray, count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Label skew: each class is divided in proportions drawn from Dirichlet(alpha).

    Hsu et al. 2019, arXiv 1909.06335, section 2. A large alpha makes the sites alike, a small one gives each class to
    few of them. A site that would be left with nothing takes a row from the largest.
    """
    if not 1 <= count <= len(labels) or not alpha > 0:
        raise ValueError(f"{len(labels)} rows cannot be divided among {count} sites with alpha {alpha}")
    rng = np.random.default_rng(seed)
    sites: list[list[int]] = [[] for _ in range(count)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(count, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for site, part in zip(sites, np.split(rows, cuts), strict=True):
            site.extend(part.tolist())
    for site in sites:
        if not site:
            site.append(max(sites, key=len).pop())
    return [np.sort(np.array(site, dtype=np.int64)) for site in sites]


def shards(labels: np.ndarray, count: int, each: int, seed: int) -> list[np.ndarray]:
    """Label skew: the rows sorted by class are cut into `count * each` shards, of which every site gets `each`.

    McMahan et al. 2017, arXiv 1602.05629, section 3, where two shards gave most sites two classes.
    """
    pieces = count * each
    if count < 1 or each < 1 or pieces > len(labels):
        raise ValueError(f"{len(labels)} rows cannot be cut into {count} x {each} shards")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    cut = np.array_split(order, pieces)
    dealt = rng.permutation(pieces).reshape(count, each)
    return [np.sort(np.concatenate([cut[piece] for piece in hand])) for hand in dealt]


def quantity(rows: int, count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Size skew: the sites' shares of the rows are drawn from Dirichlet(alpha), and each site has one row at least.

    Li et al. 2022, arXiv 2102.02079, section 4.3.
    """
    if not 1 <= count <= rows or not alpha > 0:
        raise ValueError(f"{rows} rows cannot be divided among {count} sites with alpha {alpha}")
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(count, alpha))
    # Beside the row that each site has for certain.
    cuts = np.floor(np.cumsum(shares)[:-1] * (rows - count)).astype(np.int64) + np.arange(1, count)
    return [np.sort(part) for part in np.split(rng.permutation(rows), cuts)]


def domains(
    domain: np.ndarray, count: int, seed: int, labels: np.ndarray | None = None, alpha: float | None = None
) -> list[np.ndarray]:
    """Domain shift: site i has rows of one domain only, the (i mod d)th of d.

    Sites that share a domain divide it as `iid` does, or by `labels` as `dirichlet` does with `alpha`.
    """
    names = np.unique(domain)
    if count < len(names):
        raise ValueError(f"{count} sites with a domain each cannot have {len(names)} domains between them")
    found: list[np.ndarray] = [np.empty(0, np.int64)] * count
    for place, name in enumerate(names):
        rows = np.flatnonzero(domain == name)
        sites = range(place, count, len(names))
        if alpha is None or labels is None:
            parts = iid(len(rows), len(sites), seed + place)
        else:
            parts = dirichlet(labels[rows], len(sites), alpha, seed + place)
        for site, part in zip(sites, parts, strict=True):
            found[site] = rows[part]
    return found
