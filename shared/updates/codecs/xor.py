"""The exclusive or of bit patterns with those of the version that the worker started from. Exact.

A little larger than `bits` on trained floats, where a step over a power of two flips every bit below it.
"""

from __future__ import annotations

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.bits import UNSIGNED
from tessera.shared.updates.codecs.stage import ArrayLayout, CodecError, Stage


class Xor(Stage):
    name = "xor"
    reads_base = True

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        width = layout.dtype.itemsize
        if width not in UNSIGNED:
            raise CodecError("codec-type", "stage xor takes numbers of 2, 4 or 8 bytes; it comes first")
        return ArrayLayout(layout.size, UNSIGNED[width])

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        kind = UNSIGNED[values.dtype.itemsize]
        flipped: Array = values.view(kind) ^ base.view(kind)
        return flipped

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        kind = UNSIGNED[layout.dtype.itemsize]
        values: Array = (encoded.view(kind) ^ base.view(kind)).view(layout.dtype)
        return values


STAGE = Xor
