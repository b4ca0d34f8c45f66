"""Byte planes: the first bytes of all elements, then the second bytes, and so on.

Exponents and signs vary little, mantissas much; grouped by byte, the former compress well.
"""

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs.stage import U8, ArrayLayout, Stage

FEW = 1 << 10
"""Number of elements up to which one operation is faster than one for each plane."""


class Shuffle(Stage):
    name = "shuffle"

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(layout.nbytes, U8)

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        # [elements, width] -> [width, elements]
        return values.view(U8).reshape(-1, values.dtype.itemsize).T.reshape(-1)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        planes = encoded.reshape(layout.dtype.itemsize, layout.size)
        if layout.size <= FEW:
            return planes.T.reshape(-1).view(layout.dtype)
        values = np.empty(layout.size, layout.dtype)
        places = values.view(U8).reshape(layout.size, layout.dtype.itemsize)
        # Plane by plane: numpy transposes byte by byte, which takes four times as long.
        for byte, plane in enumerate(planes):
            places[:, byte] = plane
        return values


STAGES = (Shuffle,)
