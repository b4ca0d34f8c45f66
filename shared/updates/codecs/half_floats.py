"""Differences as 16-bit floats: half the bytes of float32."""

import ml_dtypes
import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import ArrayLayout, Stage, floats_only

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype("<f2")
LARGEST = float(np.finfo(F16).max)


class BFloat16(Stage):
    """bfloat16: the range of float32, with 8 bits of precision."""

    name = "bf16"
    lossless = False
    dtype: np.dtype = BF16

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(floats_only(type(self), layout).size, self.dtype)

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        return values.astype(BF16)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        return encoded.astype(layout.dtype)


class Float16(BFloat16):
    """float16: 11 bits of precision from 6e-5 to 65504, to which larger values are clipped.

    More precise than `bf16` unless differences are below 6e-5, as with a small learning rate.
    """

    name = "fp16"
    dtype = F16

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        within: Array = np.clip(values, -LARGEST, LARGEST).astype(F16)
        return within


STAGES = (BFloat16, Float16)
