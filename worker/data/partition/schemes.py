"""How a data set is divided among sites, as settings say it, and which part of it is this site's.

part = { scheme = "dirichlet", count = 4, alpha = 0.1, index = 0 }

Each algorithm gives `count` disjoint sets of rows that together are all rows, [rows of a site] each and ascending,
none of them empty, and the same ones for the same seed. Each raises ValueError for what cannot be divided so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from tessera.shared.schema import Frozen


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


if TYPE_CHECKING:
    # Settings name a scheme, and are read where nothing imports torch.
    from tessera.worker.data.dataset import Dataset

MAX_SITES = 1000

Alpha = Annotated[float, Field(gt=0, le=1e6)]


class Scheme(Frozen):
    """What every scheme says: how many sites there are, which of them this is, and the seed of its dice."""

    scheme: str
    count: PositiveInt = Field(le=MAX_SITES, description="sites")
    index: NonNegativeInt | None = Field(default=None, description="which of them this is, from 0")
    seed: NonNegativeInt = Field(default=0, lt=1 << 32)

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.index is not None and self.index >= self.count:
            raise ValueError(f"index {self.index} is not below count {self.count}")
        return self

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        """Return the rows of each site. Raises ValueError for a data set that cannot be divided so."""
        raise NotImplementedError

    def told(self, index: int) -> str | None:
        """Return what is done to a site's examples, for people."""
        return None

    def _classes(self, dataset: Dataset) -> np.ndarray:
        if dataset.classes is None:
            raise ValueError(f"scheme {self.scheme} needs one class for each example, as labels [n] of integers")
        return dataset.classes.numpy()


class Iid(Scheme):
    """The sites are alike."""

    scheme: Literal["iid"]

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return iid(dataset.examples, self.count, self.seed)


class Dirichlet(Scheme):
    """Each class is divided in proportions of its own."""

    scheme: Literal["dirichlet"]
    alpha: Alpha = Field(default=1.0, description="small: each site has few classes; large: all are alike")

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return dirichlet(self._classes(dataset), self.count, self.alpha, self.seed)


class Shards(Scheme):
    """Each site has a few runs of the examples sorted by class."""

    scheme: Literal["shards"]
    each: PositiveInt = Field(default=2, description="shards for each site")

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return shards(self._classes(dataset), self.count, self.each, self.seed)


class Quantity(Scheme):
    """The sites are alike but for how much they have."""

    scheme: Literal["quantity"]
    alpha: Alpha = Field(default=1.0, description="small: few sites have most; large: all have as much")

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        return quantity(dataset.examples, self.count, self.alpha, self.seed)


class Domain(Scheme):
    """Each site has examples of one domain, or with `alpha` its own mix of them."""

    scheme: Literal["domain"]
    alpha: Alpha | None = Field(default=None, description="divides each domain in proportions of its own")
    label_alpha: Alpha | None = Field(default=None, description="skews the labels of the sites that share a domain")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.alpha is not None and self.label_alpha is not None:
            raise ValueError("alpha mixes domains, label_alpha is for sites with one: give one of them")
        return self

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        if dataset.domains is None:
            raise ValueError("scheme domain needs the domain of each example, and this data set does not tell it")
        found = dataset.domains.numpy()
        if self.alpha is not None:
            return dirichlet(found, self.count, self.alpha, self.seed)
        labels = None if self.label_alpha is None else self._classes(dataset)
        return domains(found, self.count, self.seed, labels, self.label_alpha)


class Distortion(Frozen):
    """What becomes of a site's images: turned, then inverted, then noisy."""

    quarter_turns: int = Field(default=0, ge=0, le=3, description="counter-clockwise")
    invert: bool = False
    noise: NonNegativeFloat = Field(default=0.0, description="standard deviation, in the units of the pixels")

    def __str__(self) -> str:
        said = [
            f"turned {90 * self.quarter_turns} degrees" if self.quarter_turns else "",
            "inverted" if self.invert else "",
            f"noise {self.noise:g}" if self.noise else "",
        ]
        return ", ".join(filter(None, said)) or "as they are"


class Shift(Scheme):
    """The sites' images look different: site i has the (i mod d)th of d distortions."""

    scheme: Literal["shift"]
    alpha: Alpha | None = Field(default=None, description="skews labels too, as scheme dirichlet")
    distortions: tuple[Distortion, ...] = Field(
        default=(Distortion(), Distortion(quarter_turns=1), Distortion(invert=True), Distortion(noise=0.5)),
        min_length=1,
    )

    def rows(self, dataset: Dataset) -> list[np.ndarray]:
        if self.alpha is None:
            return iid(dataset.examples, self.count, self.seed)
        return dirichlet(self._classes(dataset), self.count, self.alpha, self.seed)

    def told(self, index: int) -> str:
        return str(self.distortion(index))

    def distortion(self, index: int) -> Distortion:
        """Return what becomes of a site's images."""
        return self.distortions[index % len(self.distortions)]

    def noise_seed(self, index: int) -> int:
        """Return a seed for a site's noise: no two sites draw the same."""
        return self.seed * MAX_SITES + index


Partition = Annotated[Iid | Dirichlet | Shards | Quantity | Domain | Shift, Field(discriminator="scheme")]
"""How a data set is divided, whoever has which part."""


def _says_which(part: Scheme) -> Scheme:
    if part.index is None:
        raise ValueError(f"index: say which of the {part.count} parts this site has, from 0")
    return part


SitePartition = Annotated[Partition, AfterValidator(_says_which)]
"""A partition that says which part of it is meant."""
