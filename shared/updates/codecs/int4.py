"""Differences in four bits, two to a byte, in blocks of 64 with a scale each: about an eighth of float32."""

from __future__ import annotations

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.quantized import Quantized
from tessera.shared.updates.codecs.stage import U8


class Int4(Quantized):
    name = "int4"
    block = 64
    levels = 7

    def _packed_bytes(self, size: int) -> int:
        return -(-size // 2)

    def _pack(self, steps: Array) -> Array:
        # As -7 to 7, plus 8; the even elements in the low half of a byte.
        shifted = (steps + 8).view(U8)
        low, high = shifted[::2], shifted[1::2]
        packed = low.copy()
        packed[: high.size] |= high << 4
        return packed

    def _unpack(self, packed: Array, size: int) -> Array:
        steps = np.empty(2 * packed.size, np.int8)
        steps[::2] = packed & 15
        steps[1::2] = packed >> 4
        steps -= 8
        return steps[:size]


STAGE = Int4
