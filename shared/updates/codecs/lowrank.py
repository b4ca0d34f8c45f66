"""A matrix of differences as the product of two thin ones: `lowrank=16` sends 16 columns and 16 rows.

The subspace is found by power iteration from a random start, as in PowerSGD (Vogels, Karimireddy and Jaggi 2019,
arXiv 1905.13727), with a second iteration in place of a warm start. The site keeps the error and adds it to the next
round's difference. Blocks that are not matrices, or too small to benefit, skip this stage.

The product is summed one rank at a time, so that it has the same bits on every machine.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np

from tessera.shared.tensors.lazy import Array, chunk_counts
from tessera.shared.updates.codecs.stage import F32, CodecError, Stage

ITERATIONS = 2
MAX_FACTORS = 1 << 22
"""The limit of both factors, which are held in memory, in elements: 16 MiB."""
HIGHEST_RANK = 128
"""The product takes this many passes over the block, at the coordinator too."""


@dataclass(frozen=True)
class LowRank:
    """A stage of whole blocks, directly after `delta`; its output is both factors as one flat float32 array."""

    name = "lowrank"
    lossless = False
    buffered, unequal_steps = Stage.buffered, Stage.unequal_steps

    rank: int

    @classmethod
    def of(cls, parameter: str | None) -> Self:
        rank = int(parameter) if parameter and parameter.isdecimal() and len(parameter) < 5 else 0
        if not 0 < rank <= HIGHEST_RANK:
            raise CodecError("codec-parameter", f"stage lowrank takes a rank up to {HIGHEST_RANK}, as in lowrank=16")
        return cls(rank)

    def pays(self, shape: tuple[int, ...]) -> bool:
        """Return True if the factors of a block of this shape are at most half of it, and within `MAX_FACTORS`."""
        return len(shape) > 1 and 2 * self.size(shape) <= prod(shape) and self.size(shape) <= MAX_FACTORS

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements of both factors."""
        rows, columns = _matrix(shape)
        return self.rank * (rows + columns)

    def encode(
        self, chunks: Callable[[], Iterable[Array]], shape: tuple[int, ...], rng: np.random.Generator
    ) -> Array:
        """Return the factors, float32, of a block; each call of `chunks` returns its flat chunks."""
        rows, columns = _matrix(shape)
        right = rng.standard_normal((columns, self.rank), dtype=np.float32)
        left = np.empty((rows, self.rank), F32)
        for _ in range(ITERATIONS):
            for start, part in _rows(chunks(), columns):
                left[start : start + len(part)] = part @ right
            left = np.linalg.qr(left)[0]
            right = np.zeros((columns, self.rank), F32)
            for start, part in _rows(chunks(), columns):
                right += part.T @ left[start : start + len(part)]
        # Columns of a pair get the same norm, column by column, so that a later stage may round them with one scale.
        sizes = np.sqrt(np.linalg.norm(right, axis=0))
        sizes[sizes == 0] = 1
        return np.concatenate([(left * sizes).T.reshape(-1), (right / sizes).T.reshape(-1)])

    def decode(self, factors: Array, shape: tuple[int, ...]) -> Iterator[Array]:
        """Yield the flat chunks of the product."""
        rows, columns = _matrix(shape)
        left = factors[: rows * self.rank].reshape(self.rank, rows)
        right = factors[rows * self.rank :].reshape(self.rank, columns)
        start = 0
        for count in chunk_counts(rows * columns):
            first, last = start // columns, -(-(start + count) // columns)
            product = np.zeros((last - first, columns), F32)
            for column, row in zip(left[:, first:last], right, strict=True):
                product += column[:, None] * row
            skipped = start - first * columns
            yield product.reshape(-1)[skipped : skipped + count]
            start += count


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of rows and columns; axes after the first are joined."""
    return shape[0], prod(shape[1:])


def _rows(chunks: Iterable[Array], columns: int) -> Iterator[tuple[int, Array]]:
    """Yield whole rows from flat chunks, with the index of the first."""
    start, left = 0, np.empty(0, F32)
    for chunk in chunks:
        joined = np.concatenate([left, chunk]) if left.size else chunk
        whole = joined.size // columns
        if whole:
            yield start, joined[: whole * columns].reshape(whole, columns)
        start += whole
        left = joined[whole * columns :].copy()


STAGES = (LowRank,)
