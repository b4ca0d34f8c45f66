"""The number of examples of each class and of each domain at the sites of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from tessera.worker.data.dataset import Dataset


@dataclass(frozen=True)
class ClassCounts:
    """Counts of classes or of domains at each site."""

    what: str
    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [sites][names]


def class_counts(parts: Sequence[Dataset], names: Sequence[str] | None = None) -> list[ClassCounts]:
    """Return the counts of the parts' classes and domains, if they have any, or else of one class `none`.

    `names` are the names of the first classes, if they are known.
    """
    classes, domains = (
        _counts("class", [part.classes for part in parts]),
        _counts("domain", [part.domains for part in parts]),
    )
    if classes and names:
        known = dict(enumerate(names))
        classes = replace(classes, names=tuple(known.get(int(name), name) for name in classes.names))
    plain = ClassCounts("class", ("none",), tuple((part.examples,) for part in parts))
    return [counts for counts in (classes, domains) if counts] or [plain]


def _counts(what: str, of_sites: Sequence[Tensor | None]) -> ClassCounts | None:
    """Return the counts at each site of each value that occurs at any of them."""
    values = [of_site.numpy() for of_site in of_sites if of_site is not None]
    if not values:
        return None
    distinct = np.unique(np.concatenate(values)).tolist()
    counts = tuple(tuple(int((of_site == value).sum()) for value in distinct) for of_site in values)
    return ClassCounts(what, tuple(map(str, distinct)), counts)
