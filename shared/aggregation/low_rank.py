"""Products of low-rank factors: their sum beside a base, and its best factors of a smaller rank.

Sums are elementwise, one rank after the other, so that the same factors in the same order give the same bits on every
machine. The factors of a smaller rank come from LAPACK, whose last bits may differ between processors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import Array, ArrayTensor, Tensor, to_array

Product = tuple[float, Tensor, Tensor]
"""A weight, B [outputs, rank] and A [rank, inputs]: the weight times B A."""


@dataclass(frozen=True)
class ProductSum:
    """`base` plus the sum of `products`, transposed if the base is [inputs, outputs].

    The factors are read when the tensor is, and then held; the sum is computed chunk by chunk.
    """

    base: Tensor
    products: Sequence[Product]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def chunks(self) -> Iterator[Array]:
        wide = np.float64 if self.dtype == "F64" else np.float32
        rows, columns = stacked(self.products, wide)
        if self.transposed:
            rows, columns = columns.T, rows.T
        width, at = columns.shape[1], 0
        for chunk in self.base.chunks():
            # The whole rows that the chunk lies in.
            first, last = at // width, -(-(at + chunk.size) // width)
            total = np.zeros((last - first, width), wide)
            for left, right in zip(rows[first:last].T, columns, strict=True):
                total += left[:, None] * right
            skipped = at - first * width
            summed = chunk.astype(wide) + total.reshape(-1)[skipped : skipped + chunk.size]
            yield summed.astype(NUMPY_DTYPES[self.dtype])
            at += chunk.size


def stacked(products: Sequence[Product], dtype: type[np.floating]) -> tuple[Array, Array]:
    """Return matrices [outputs, ranks] and [ranks, inputs] whose product is the sum of the products (FLoRA: Wang et
    al. 2024, arXiv 2409.05976, equation 5)."""
    rows = [to_array(b).astype(dtype) * dtype(weight) for weight, b, _ in products]
    return np.concatenate(rows, axis=1), np.concatenate([to_array(a).astype(dtype) for *_, a in products])


@dataclass(frozen=True)
class BestFactors:
    """B [outputs, rank] and A [rank, inputs] whose product is the closest to the sum of `products`.

    The rows of A are orthonormal, and B has the singular values, the largest first: also a row beyond the rank of the
    sum can train. Both are zero beyond the number of outputs or inputs.
    """

    products: Sequence[Product]
    rank: int

    @cached_property
    def factors(self) -> tuple[Array, Array]:
        # The decomposition of a matrix of the stacked rank, in place of one of outputs by inputs.
        rows, columns = stacked(self.products, np.float64)
        (left, upper), (right, lower) = np.linalg.qr(rows), np.linalg.qr(columns.T)
        u, singular, v = np.linalg.svd(upper @ lower.T, full_matrices=False)
        kept = min(self.rank, singular.size)
        b, a = np.zeros((len(rows), self.rank)), np.zeros((self.rank, columns.shape[1]))
        b[:, :kept], a[:kept] = (left @ u[:, :kept]) * singular[:kept], v[:kept] @ right.T
        # A row of A may have either sign: its largest entry becomes positive.
        signs = np.sign(np.take_along_axis(a, np.abs(a).argmax(axis=1)[:, None], axis=1)[:, 0])
        return b * signs, a * signs[:, None]


@dataclass(frozen=True)
class DeferredArray:
    """A tensor in memory that is computed when it is read."""

    shape: tuple[int, ...]
    dtype: DType
    compute: Callable[[], Array]

    def chunks(self) -> Iterator[Array]:
        return ArrayTensor(self.compute(), self.dtype).chunks()


@dataclass(frozen=True)
class RowsOf:
    """The rows of several matrices of one width, one matrix after the other."""

    tensors: Sequence[Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:])

    @property
    def dtype(self) -> DType:
        return self.tensors[0].dtype

    def chunks(self) -> Iterator[Array]:
        return ArrayTensor(np.concatenate([to_array(tensor) for tensor in self.tensors]), self.dtype).chunks()
