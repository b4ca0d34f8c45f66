"""Schemes that divide a data set among sites, as the settings describe them.

part = { scheme = "dirichlet", count = 4, alpha = 0.1, index = 0 }

Each algorithm gives `count` disjoint sets of rows that together are all rows, [rows of a site] each and ascending,
none of them empty, and the same sets for the same seed. Each raises ValueError if the rows cannot be divided so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from tessera.shared.schema import Value


def iid(rows: int, count: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each site, drawn at random; the sites' numbers of rows differ by at most one."""
    if not 1 <= count <= rows:
        raise ValueError(f"{rows} rows cannot be divided among {count} sites")
    order = np.random.default_rng(seed).permutation(rows)
    return [np.sort(part) for part in np.array_split(order, count)]


def dirichlet(labels: np.ndarray, count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Return the rows of each site, with each class divided in proportions drawn from Dirichlet(alpha): label skew.

    Hsu et al. 2019, arXiv 1909.06335, section 2. A large alpha makes the sites similar, a small one gives each class
    to few of them. A site without rows gets one from the largest site.
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
    """Return the rows of each site: `each` of `count * each` shards of the rows sorted by class (label skew).

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
    """Return the rows of each site, whose shares are drawn from Dirichlet(alpha): size skew. Each has one at least.

    Li et al. 2022, arXiv 2102.02079, section 4.3.
    """
    if not 1 <= count <= rows or not alpha > 0:
        raise ValueError(f"{rows} rows cannot be divided among {count} sites with alpha {alpha}")
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(count, alpha))
    # Each site has one row in addition to its share of the others.
    cuts = np.floor(np.cumsum(shares)[:-1] * (rows - count)).astype(np.int64) + np.arange(1, count)
    return [np.sort(part) for part in np.split(rng.permutation(rows), cuts)]


def domains(
    domain: np.ndarray, count: int, seed: int, labels: np.ndarray | None = None, alpha: float | None = None
) -> list[np.ndarray]:
    """Return the rows of each site, where site i has only rows of the (i mod d)th of d domains: domain shift.

    Sites that share a domain divide it as `iid` does, or by `labels` as `dirichlet` does with `alpha`.
    """
    names = np.unique(domain)
    if count < len(names):
        raise ValueError(f"{count} sites with one domain each cannot have {len(names)} domains: raise count")
    parts: list[np.ndarray] = [np.empty(0, np.int64)] * count
    for place, name in enumerate(names):
        rows = np.flatnonzero(domain == name)
        sites = range(place, count, len(names))
        if alpha is None or labels is None:
            chosen = iid(len(rows), len(sites), seed + place)
        else:
            chosen = dirichlet(labels[rows], len(sites), alpha, seed + place)
        for site, part in zip(sites, chosen, strict=True):
            parts[site] = rows[part]
    return parts


if TYPE_CHECKING:
    # The settings import this module, and must not import torch.
    from tessera.worker.data.dataset import Dataset

MAX_SITES = 1000

Alpha = Annotated[float, Field(gt=0, le=1e6)]


class Scheme(Value):
    """The settings of every scheme: the number of sites, this site's index, and the seed of random draws."""

    scheme: str
    count: PositiveInt = Field(le=MAX_SITES, description="number of sites")
    index: NonNegativeInt | None = Field(default=None, description="this site's number, from 0")
    seed: NonNegativeInt = Field(default=0, lt=1 << 32)

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.index is not None and self.index >= self.count:
            raise ValueError(f"index {self.index} is not below count {self.count}: indices begin at 0")
        return self

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        """Return the rows of each site. Raises ValueError if the scheme cannot divide the data set."""
        raise NotImplementedError

    def describe(self, index: int) -> str | None:
        """Return a description of the changes to a site's examples, or None if there are none."""
        return None

    def _classes(self, dataset: Dataset) -> np.ndarray:
        if dataset.classes is None:
            raise ValueError(f"scheme {self.scheme} needs one class for each example: integer labels [n]")
        return dataset.classes.numpy()


class Iid(Scheme):
    """Sites without systematic differences."""

    scheme: Literal["iid"]

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return iid(dataset.examples, self.count, self.seed)


class Dirichlet(Scheme):
    """Label skew: each class is divided in proportions of its own."""

    scheme: Literal["dirichlet"]
    alpha: Alpha = Field(default=1.0, description="small: each site has few classes; large: the sites are similar")

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return dirichlet(self._classes(dataset), self.count, self.alpha, self.seed)


class Shards(Scheme):
    """Label skew: each site has a few shards of the examples sorted by class."""

    scheme: Literal["shards"]
    each: PositiveInt = Field(default=2, description="shards for each site")

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return shards(self._classes(dataset), self.count, self.each, self.seed)


class Quantity(Scheme):
    """Size skew: the sites differ only in their number of examples."""

    scheme: Literal["quantity"]
    alpha: Alpha = Field(default=1.0, description="small: few sites have most examples; large: the shares are equal")

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return quantity(dataset.examples, self.count, self.alpha, self.seed)


class Domain(Scheme):
    """Domain shift: each site has examples of one domain, or with `alpha` its own mix of domains."""

    scheme: Literal["domain"]
    alpha: Alpha | None = Field(default=None, description="divides each domain in proportions of its own")
    label_alpha: Alpha | None = Field(default=None, description="skews the labels of the sites that share a domain")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.alpha is not None and self.label_alpha is not None:
            raise ValueError("alpha mixes domains, label_alpha is for sites with one domain: give one of them")
        return self

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        if dataset.domains is None:
            raise ValueError("scheme domain needs the domain of each example, which this data set does not have")
        origins = dataset.domains.numpy()
        if self.alpha is not None:
            return dirichlet(origins, self.count, self.alpha, self.seed)
        labels = None if self.label_alpha is None else self._classes(dataset)
        return domains(origins, self.count, self.seed, labels, self.label_alpha)


class Distortion(Value):
    """A distortion of images: they are turned, then inverted, then noise is added."""

    quarter_turns: int = Field(default=0, ge=0, le=3, description="counter-clockwise")
    invert: bool = False
    noise: NonNegativeFloat = Field(default=0.0, description="standard deviation, in the units of the pixels")

    def __str__(self) -> str:
        changes = [
            f"turned {90 * self.quarter_turns} degrees" if self.quarter_turns else "",
            "inverted" if self.invert else "",
            f"noise {self.noise:g}" if self.noise else "",
        ]
        return ", ".join(filter(None, changes)) or "as they are"


class Shift(Scheme):
    """Feature shift: site i distorts its images by the (i mod d)th of d distortions."""

    scheme: Literal["shift"]
    alpha: Alpha | None = Field(default=None, description="skews labels too, as scheme dirichlet does")
    distortions: tuple[Distortion, ...] = Field(
        default=(Distortion(), Distortion(quarter_turns=1), Distortion(invert=True), Distortion(noise=0.5)),
        min_length=1,
    )

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        if self.alpha is None:
            return iid(dataset.examples, self.count, self.seed)
        return dirichlet(self._classes(dataset), self.count, self.alpha, self.seed)

    def describe(self, index: int) -> str:
        return str(self.distortion(index))

    def distortion(self, index: int) -> Distortion:
        """Return the distortion of a site's images."""
        return self.distortions[index % len(self.distortions)]

    def noise_seed(self, index: int) -> int:
        """Return the seed of a site's noise, which differs from every other site's."""
        return self.seed * MAX_SITES + index


Partition = Annotated[Iid | Dirichlet | Shards | Quantity | Domain | Shift, Field(discriminator="scheme")]
"""A division of a data set among sites."""


def _check_index(part: Scheme) -> Scheme:
    if part.index is None:
        raise ValueError(f"index: give this site's part, from 0 to {part.count - 1}")
    return part


SitePartition = Annotated[Partition, AfterValidator(_check_index)]
"""A partition with the index of this site's part."""
