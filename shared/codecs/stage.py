"""What a codec's stage promises."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from shared.tensors import Array


class CodecError(ValueError):
    """Bytes that are not what their codec says, or a codec that there is not."""


class Layout(NamedTuple):
    """A flat array's size and element type. A size of -1 depends on the data."""

    size: int
    dtype: np.dtype


class Stage(Protocol):
    name: str
    lossless: bool

    def layout(self, layout: Layout) -> Layout:
        """The layout of what `encode` returns for an array of this layout. Raises CodecError if it takes none."""
        ...

    def encode(self, values: Array, base: Array) -> Array:
        """`values`, flat, written in this stage's way; `base` is the version's own chunk, for the first stage."""
        ...

    def decode(self, encoded: Array, layout: Layout, base: Array) -> Array:
        """The inverse of `encode`, giving an array of `layout`. Raises CodecError; never makes more than that."""
        ...
