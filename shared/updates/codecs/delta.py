"""The difference from the version that the worker started from, as float32: the input of all lossy stages.

Not exact: the sum with the version rounds again, which moves about one element in a hundred to its neighbour. For an
exact codec use `bits`.
"""

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import F32, ArrayLayout, CodecError, Stage


def difference(values: Array, base: Array) -> Array:
    """Return `values - base` as float32."""
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

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        return difference(values, base)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        wide = _wide(layout.dtype)
        values: Array = base.astype(wide, copy=False) + encoded.astype(wide, copy=False)
        return values.astype(layout.dtype, copy=False)


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which differences of this type are computed."""
    return np.dtype(np.float64) if dtype.itemsize == 8 else F32


STAGES = (Delta,)
