"""Counts of subjects that may leave a site: none of fewer subjects than a minimum, and none exact.

A subject is a group of examples, such as a patient's, or an example of its own. A table counts the subjects in each
of its cells. Where a cell has fewer than the minimum, its examples are left out of *every* table, until no cell has
too few. So the counts equal the counts of a data set without these examples: a suppressed cell looks like an empty
one, and no difference between two tables shows it. Then each count is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tessera.shared.api.descriptions import TableName
from tessera.shared.privacy.discrete_gaussian import discrete_gaussian
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.tensors.lazy import Array
from tessera.worker.governance.disclosure import DisclosureRule

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CellTable:
    """The cells of a table that each example is in. An example may be in several, or in none."""

    examples: Array
    """int64 [entries]."""
    cells: Array
    """The number of a cell, int64 [entries]."""
    size: int
    """The number of cells."""

    @classmethod
    def of(cls, cells: Array, size: int) -> CellTable:
        """Return a table in which each example is in one cell, int64 [examples], or in none, -1."""
        examples = np.flatnonzero(cells >= 0)
        return cls(examples, cells[examples], size)

    def counts(self, subjects: Array, kept: Array) -> Array:
        """Return the number of distinct subjects in each cell, int64 [size], of the examples `kept`, bool [examples].
        `subjects` is the number of each example's subject."""
        entries = kept[self.examples]
        cells, number = self.cells[entries], subjects[self.examples[entries]]
        distinct = np.unique(np.stack([cells, number]), axis=1)[0]
        return np.bincount(distinct, minlength=self.size)


@dataclass(frozen=True, eq=False)
class SubjectTables:
    """The subjects of a data set, as only its site may see them."""

    subjects: Array
    """The number of each example's subject, int64 [examples]."""
    digests: Array
    """A digest of each subject's name and one of its examples, uint64 [subjects, 2]."""
    tables: Mapping[TableName, CellTable]
    unknown_tokens: float | None = None
    """The largest of `UNKNOWN_SHARES` that the share of unknown tokens reaches; None without a tokenizer."""


def disclosed_counts(subjects: Array, tables: Mapping[T, CellTable], rule: DisclosureRule) -> dict[T, Array]:
    """Return the counts of each table that may leave, int64 [cells]. `subjects`, int64 [examples], is the number of
    each example's subject.

    """
    kept = kept_examples(subjects, tables.values(), rule.minimum)
    return {name: rule.shown(table.counts(subjects, kept)) for name, table in tables.items()}


def kept_examples(subjects: Array, tables: Collection[CellTable], minimum: int) -> Array:
    """Return the mask of the examples without those in a cell of a table with fewer subjects, bool [examples].

    Leaving examples out of a table can only lower the counts of others, so the order does not matter.
    """
    kept = np.ones(len(subjects), bool)
    while True:
        before = np.count_nonzero(kept)
        for table in tables:
            counts = table.counts(subjects, kept)
            small = (counts > 0) & (counts < minimum)
            kept[table.examples[small[table.cells]]] = False
        if np.count_nonzero(kept) == before:
            return kept


def counts_along(cells: Array, size: int, rule: DisclosureRule) -> Array:
    """Return counts of ordered cells that may leave, int64 [size]. `cells` has the cell of each subject, int64
    [subjects].

    Suppressed cells would hide most of a small site's scores, so no subject is left out unless all are too few:
    neighbouring cells are taken together until they have the minimum, and count at the place of their middle subject.
    So a cell that shows zero may be empty or not, and each count is of as many subjects as the minimum.
    """
    shown, ordered = np.zeros(size, np.int64), np.sort(cells)
    begin = 0
    for end in (*(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)):
        left = len(ordered) - end
        if end - begin >= rule.minimum and (left == 0 or left >= rule.minimum):
            shown[ordered[(begin + end) // 2]] = end - begin
            begin = end
    return rule.shown(shown)


def noisy_counts(
    subjects: Array, tables: Mapping[T, CellTable], rule: DisclosureRule, rho: float, source: NoiseSource
) -> dict[T, Array]:
    """Return counts with discrete Gaussian noise that costs a subject `rho` in zCDP, rounded as others.

    Of each subject one example counts, and of it one cell of each table, both drawn at random. So replacing a subject
    moves two counts of a table by one.
    """
    chosen = _one_of_each(subjects, source)
    deviation = max(1, math.ceil(math.sqrt(len(tables) / rho)))
    found = {}
    for name, table in tables.items():
        entries = np.flatnonzero(chosen[table.examples])
        once = entries[_one_of_each(table.examples[entries], source)]
        counts = np.bincount(table.cells[once], minlength=table.size)
        found[name] = rule.shown((counts + discrete_gaussian(source, deviation, table.size)).clip(min=0))
    return found


def _one_of_each(values: Array, source: NoiseSource) -> Array:
    """Return a mask of one place of each distinct value, drawn at random, bool [values]."""
    order = np.argsort(source.words(len(values)), kind="stable")
    _, first = np.unique(values[order], return_index=True)
    mask = np.zeros(len(values), bool)
    mask[order[first]] = True
    return mask
