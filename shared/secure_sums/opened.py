"""The mean step of an opened sum: masked updates less the sums of their masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.shared.secure_sums.masked_update import RingTensor
from tessera.shared.secure_sums.masks import RING_DTYPES
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import Array, chunk_counts


@dataclass(frozen=True)
class OpenedSum:
    """The integers that senders had under their masks, summed: exact, in any order of the senders."""

    updates: Sequence[RingTensor]
    mask_sums: Sequence[RingTensor]
    bits: int
    numel: int

    def chunks(self) -> Iterator[Array]:
        """Yield signed integers, flat."""
        updates = [tensor.chunks() for tensor in self.updates]
        mask_sums = [tensor.chunks() for tensor in self.mask_sums]
        dtype = RING_DTYPES[self.bits]
        for count in chunk_counts(self.numel):
            total = np.zeros(count, dtype)
            for chunks in updates:
                np.add(total, next(chunks), out=total)
            for chunks in mask_sums:
                np.subtract(total, next(chunks), out=total)
            yield total.view(np.dtype(f"<i{self.bits // 8}"))


@dataclass(frozen=True)
class MeanStep:
    """An opened sum as the senders' mean step, float32."""

    total: OpenedSum
    factor: float
    """The value of 1 in the sum: the terms' max_weight 2^exponent over the weight to divide by, of either sign."""
    shape: tuple[int, ...]
    dtype: DType = "F32"

    def chunks(self) -> Iterator[Array]:
        for chunk in self.total.chunks():
            # The addition turns -0.0 into 0.0: where the sum is zero, the step is.
            yield (chunk * self.factor).astype(np.float32) + np.float32(0)
