"""The number of examples of each class and of each domain at the sites of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tessera.worker.data.dataset import Dataset


@dataclass(frozen=True)
class ClassCounts:
    """Counts of classes or of domains at each site."""

    what: str
    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [sites][names]


def tallies(parts: Sequence[Dataset], names: Sequence[str] | None = None) -> list[ClassCounts]:
    """Return the counts of the parts' classes and domains, if they have any, or else of one class `none`.

    `names` are the names of the first classes, if they are known.
    """
    found = [("class", [part.classes for part in parts]), ("domain", [part.domains for part in parts])]
    told = [_tally(what, [value for value in values if value is not None]) for what, values in found]
    classes, domains = told
    if classes and names:
        known = dict(enumerate(names))
        classes = ClassCounts(
            classes.what, tuple(known.get(int(name), name) for name in classes.names), classes.counts
        )
    plain = ClassCounts("class", ("none",), tuple((part.examples,) for part in parts))
    return [tally for tally in (classes, domains) if tally] or [plain]


def _tally(what: str, values: Sequence[Tensor]) -> ClassCounts | None:
    """Return the counts at each site of each value that occurs at any of them."""
    if not values:
        return None
    everywhere = np.unique(np.concatenate([of_site.numpy() for of_site in values]))
    counts = tuple(tuple(int((of_site == value).sum()) for value in everywhere.tolist()) for of_site in values)
    return ClassCounts(what, tuple(str(value) for value in everywhere.tolist()), counts)
