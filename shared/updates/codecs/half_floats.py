"""Differences as 16-bit floats: half the bytes of float32."""

import ml_dtypes
import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import ArrayLayout, Stage, floats_only

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype("<f2")
LARGEST = float(np.finfo(F16).max)


class BFloat16(Stage):
    """bfloat16: all of float32's range, and 8 bits of precision."""

    name = "bf16"
    lossless = False
    dtype: np.dtype = BF16

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(floats_only(type(self), layout).size, self.dtype)

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        return values.astype(BF16)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        return encoded.astype(layout.dtype)

    def bound(self, values: Array, base: Array) -> Array:
        """Return half a unit in the last of 8 places; of denormal numbers half the smallest."""
        most: Array = np.abs(values.astype(np.float64)) * 2.0**-8 + 2.0**-134
        return most


class Float16(BFloat16):
    """float16: 11 bits of precision from 6e-5 to 65504, to which larger values are clipped.

    Finer than `bf16` unless differences are smaller than that, as those of a small learning rate are.
    """

    name = "fp16"
    dtype = F16

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        within: Array = np.clip(values, -LARGEST, LARGEST).astype(F16)
        return within

    def bound(self, values: Array, base: Array) -> Array:
        """Return half a unit in the last of 11 places, or half the smallest denormal number; all that is beyond
        65504."""
        size = np.abs(values.astype(np.float64))
        most: Array = np.maximum(size * 2.0**-11 + 2.0**-25, size - LARGEST)
        return most


STAGES = (BFloat16, Float16)
