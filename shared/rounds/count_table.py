"""Counts of subjects as one block of a model, so that a round with secure sums opens their totals over sites.

Every site starts from the same table, which follows from the name of the data set. So the rule that a site sends one
update from a model into one sum holds for its counts too: the difference of two sums could be its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from tessera.shared.api.class_counts import MAX_CLASSES
from tessera.shared.api.descriptions import BINS, TableName
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName
from tessera.shared.model.spec import Model
from tessera.shared.schema import Digest, canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import Array, digest_of

CELLS: Mapping[TableName, int] = {"classes": MAX_CLASSES, "words": BINS, "tokens": BINS, "pixels": BINS}
BLOCK = Block(tensor="counts", role="other", shape=(10 + sum(CELLS.values()),), dtype="F32")
SCALE = 2.0**20
"""The table's first value. By the size of a block's values a round chooses the unit of its integers: here it is
a half or less, also for a thousand sites, and each has room for at least half a million subjects in a cell."""
ONE = 2.0**14
"""The value behind the nine that name the data set. Every site sends it, so that totals follow from the sites' mean
without their weights."""


@dataclass(frozen=True)
class CountTable:
    """The table of a data set before any site has counted: a run's model and first version."""

    dataset: str

    model = Model(config={"model_type": "counts"}, head="image-classification", blocks=(BLOCK,))

    @property
    def values(self) -> Array:
        """The scale, eight bytes that name the data set, and zeros; float32 of the block's shape."""
        found = np.zeros(BLOCK.shape, np.float32)
        found[0] = SCALE
        found[1:9] = np.frombuffer(sha256(self.dataset.encode()).digest(), np.uint8)[:8]
        return found

    @property
    def model_digest(self) -> Digest:
        return digest_of(canonical(self.model))

    def blocks(self) -> Iterator[tuple[Block, memoryview]]:
        yield BLOCK, memoryview(self.values.tobytes())

    def files(self) -> dict[FileName, bytes]:
        return {}

    def counted(self, counts: Mapping[TableName, tuple[int, ...]], terms: Terms, weight: int) -> Array:
        """Return the table with a site's counts, which weigh alike, with any `weight` of the site. Raises SumRefused
        for a count beyond the room of the sum."""
        most = int(terms.levels * 2.0 ** terms.blocks[BLOCK.name].exponent)
        share, found = terms.max_weight / weight, np.zeros(BLOCK.shape, np.float32)
        found[9] = ONE * share
        for name, start in _starts():
            shown = counts.get(name, ())
            if max(shown, default=0) > most:
                raise SumRefused(
                    "values", f"{name} has a count of more than {most}, the most that the sum has room for"
                )
            found[start : start + len(shown)] = np.multiply(shown, share)
        return self.values + found

    def totals(self, raw: bytes, senders: int) -> dict[TableName, tuple[int, ...]]:
        """Return the sums over all senders from the bytes of the table that their round committed, without zeros at
        the end. They are exact up to two million subjects."""
        step = np.frombuffer(raw, "<f4").astype(np.float64) - self.values
        counts = np.rint(step * senders * ONE / step[9]).astype(np.int64)
        return {
            name: tuple(np.trim_zeros(counts[start : start + CELLS[name]], "b").tolist()) for name, start in _starts()
        }


def _starts() -> Iterator[tuple[TableName, int]]:
    """Yield each kind of count, and the place of its first cell."""
    start = 10
    for name, size in CELLS.items():
        yield name, start
        start += size
