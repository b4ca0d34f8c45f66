"""Differences as small integers: blocks of elements with one float32 scale each.

Rounding is stochastic, up with the probability of the fraction (Alistarh et al. 2017, arXiv 1610.02132), so that the
mean of many workers' updates is unbiased. Zeros stay zeros.
"""

import numpy as np

from tessera.shared.tensors.lazy import Array, ScaledCodes, unpacked
from tessera.shared.updates.codecs.stage import F32, U8, ArrayLayout, Stage, floats_only


class QuantizedStage(Stage):
    lossless = False
    block: int
    """The number of elements with one scale."""
    levels: int
    """The largest integer."""

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        size = floats_only(type(self), layout).size
        return ArrayLayout(F32.itemsize * self._blocks(size) + self._packed_bytes(size), U8)

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        missing = self._blocks(values.size) * self.block - values.size
        padded = np.concatenate([values, np.zeros(missing, F32)]) if missing else values
        rows = padded.reshape(-1, self.block)
        scales = np.abs(rows).max(axis=1) / np.float32(self.levels)
        # A block of zeros, or of differences too small for a scale, is all zeros.
        steps = rows / np.where(scales > 0, scales, np.float32(1))[:, None]
        steps += rng.random(rows.shape, dtype=np.float32)
        np.floor(steps, out=steps)
        np.clip(np.nan_to_num(steps, copy=False), -self.levels, self.levels, out=steps)
        packed = self._pack(steps.astype(np.int8).reshape(-1)[: values.size])
        return np.concatenate([scales.view(U8), packed])

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        return unpacked(self.packed(encoded, layout))

    def packed(self, encoded: Array, layout: ArrayLayout) -> ScaledCodes:
        split = F32.itemsize * self._blocks(layout.size)
        scales = encoded[:split].copy().view(F32)
        return ScaledCodes(self._unpack(encoded[split:], layout.size), scales, self.block)

    def _blocks(self, size: int) -> int:
        return -(-size // self.block)

    def _packed_bytes(self, size: int) -> int:
        raise NotImplementedError

    def _pack(self, steps: Array) -> Array:
        """Return int8 [size] as bytes."""
        raise NotImplementedError

    def _unpack(self, packed: Array, size: int) -> Array:
        raise NotImplementedError


class Int8(QuantizedStage):
    """Eight bits, in blocks of 256: about a quarter of float32, with an error of half a percent."""

    name = "int8"
    block = 256
    levels = 127

    def _packed_bytes(self, size: int) -> int:
        return size

    def _pack(self, steps: Array) -> Array:
        return steps.view(U8)

    def _unpack(self, packed: Array, size: int) -> Array:
        return packed.view(np.int8)


class Int4(QuantizedStage):
    """Four bits, two to a byte, in blocks of 64: about an eighth of float32."""

    name = "int4"
    block = 64
    levels = 7

    def _packed_bytes(self, size: int) -> int:
        return -(-size // 2)

    def _pack(self, steps: Array) -> Array:
        # -7 to 7, plus 8; even elements are in the low half of a byte.
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


STAGES = (Int8, Int4)
