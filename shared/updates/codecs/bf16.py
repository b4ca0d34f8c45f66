"""Differences as bfloat16: half the bytes of float32, with all of its range and 8 bits of precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import ArrayLayout, Stage, floats_only

BF16 = np.dtype(ml_dtypes.bfloat16)


class BFloat16(Stage):
    name = "bf16"
    lossless = False

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(floats_only(type(self), layout).size, BF16)

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        return values.astype(BF16)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        return encoded.astype(layout.dtype)

    def bound(self, values: Array, base: Array) -> Array:
        """Return half a unit in the last of 8 places; of denormal numbers half the smallest."""
        most: Array = np.abs(values.astype(np.float64)) * 2.0**-8 + 2.0**-134
        return most


STAGE = BFloat16
