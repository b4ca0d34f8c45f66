"""Differences as float16: half the bytes of float32, 11 bits of precision from 6e-5 to 65504; above, that is what
comes out. Finer than `bf16` as long as differences are not smaller than that, which those of a small learning rate
are."""

from __future__ import annotations

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import ArrayLayout, Stage, floats_only

F16 = np.dtype("<f2")
LARGEST = float(np.finfo(F16).max)


class Float16(Stage):
    name = "fp16"
    lossless = False

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(floats_only(type(self), layout).size, F16)

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        within: Array = np.clip(values, -LARGEST, LARGEST).astype(F16)
        return within

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        return encoded.astype(layout.dtype)

    def bound(self, values: Array, base: Array) -> Array:
        """Return half a unit in the last of 11 places, or half the smallest denormal number; all that is beyond
        65504."""
        size = np.abs(values.astype(np.float64))
        most: Array = np.maximum(size * 2.0**-11 + 2.0**-25, size - LARGEST)
        return most


STAGE = Float16
