"""The difference from the version that the worker started from, as float32: what every lossy stage works on.

Not exact: to add a rounded difference rounds again, which moves about one element in a hundred to its neighbour. For
an exact codec use `bits`.
"""

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import F32, ArrayLayout, CodecError, Stage


def difference(values: Array, base: Array) -> Array:
    """`values - base` as float32."""
    wide = _wide(values.dtype)
    step: Array = values.astype(wide, copy=False) - base.astype(wide, copy=False)
    return step.astype(F32, copy=False)


class Delta(Stage):
    name = "delta"
    reads_base = True
    lossless = False

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        if layout.dtype.kind in "iu":
            raise CodecError("codec-type", "stage delta takes floats; it comes first")
        return ArrayLayout(layout.size, F32)

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        return difference(values, base)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        wide = _wide(layout.dtype)
        values: Array = base.astype(wide, copy=False) + encoded.astype(wide, copy=False)
        return values.astype(layout.dtype, copy=False)

    def bound(self, values: Array, base: Array) -> Array:
        """Return each of the two sums is rounded to the precision of what it is kept in. Behind a stage that rounds
        the differences, `values` may be larger by as much as that stage declares."""
        kept = max(float(np.finfo(F32).eps), 2.0 ** -_mantissa(base.dtype))
        most: Array = kept * (np.abs(values.astype(np.float64)) + np.abs(base.astype(np.float64)))
        return most + np.finfo(F32).smallest_subnormal


def _wide(dtype: np.dtype) -> np.dtype:
    """Return what differences of this type are computed in."""
    return np.dtype(np.float64) if dtype.itemsize == 8 else F32


def _mantissa(dtype: np.dtype) -> int:
    """Return bits of the significand that are stored."""
    return {"bfloat16": 7, "float16": 10}.get(dtype.name, 23)


STAGES = (Delta,)
