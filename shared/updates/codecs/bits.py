"""Exact differences of bit patterns from the version that the worker started from.

As integers, a float and its value after little training are close, and their difference, unlike that of floats, is
exactly reversible. Zigzag puts the sign into the lowest bit, so that small steps of either sign have leading zeros,
which the byte planes then collect.
"""

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import ArrayLayout, CodecError, Stage

UNSIGNED = {width: np.dtype(f"<u{width}") for width in (2, 4, 8)}
_SIGNED = {width: np.dtype(f"<i{width}") for width in (2, 4, 8)}


class Bits(Stage):
    name = "bits"
    reads_base = True
    elementwise = True

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        width = layout.dtype.itemsize
        if width not in UNSIGNED:
            raise CodecError("codec-type", f"stage {self.name} takes numbers of 2, 4 or 8 bytes; it comes first")
        return ArrayLayout(layout.size, UNSIGNED[width])

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        width = values.dtype.itemsize
        # Wraps around on overflow, and back in `decode`.
        step: Array = values.view(_SIGNED[width]) - base.view(_SIGNED[width])
        zigzag: Array = (step << 1) ^ (step >> (8 * width - 1))
        return zigzag.view(UNSIGNED[width])

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        width = layout.dtype.itemsize
        zigzag = encoded.view(UNSIGNED[width])
        step = (zigzag >> 1).view(_SIGNED[width]) ^ -(zigzag & 1).view(_SIGNED[width])
        values: Array = (base.view(_SIGNED[width]) + step).view(layout.dtype)
        return values


STAGES = (Bits,)
