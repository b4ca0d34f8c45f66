"""The interface of a codec's stage."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Self

import numpy as np

from tessera.shared.schema import Compatibility
from tessera.shared.tensors.lazy import Array, Steps
from tessera.shared.updates.errors import Malformed

F32 = np.dtype("<f4")
U8 = np.dtype(np.uint8)


class CodecError(Malformed):
    """Bytes that do not match their codec, or an invalid codec."""


class ArrayLayout(NamedTuple):
    """A flat array's size and element type. A size of -1 depends on the data."""

    size: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)


class Stage:
    """A transformation of flat arrays, chunk by chunk. For a first stage, `base` is the version's chunk."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    drops: ClassVar[bool] = False
    """True if it drops values rather than rounding all without bias. The site keeps the dropped part and adds it to
    the next round's differences (error feedback)."""
    elementwise: ClassVar[bool] = False
    """True if each element follows from the same element of the values and of the base alone, so that several blocks
    are encoded and decoded as one."""
    reads_base: ClassVar[bool] = False
    """True if it needs the version's chunk, and so comes first."""
    # The update is decoded with the version that it started from.
    buffered: ClassVar[Compatibility] = Compatibility()
    unequal_steps: ClassVar[Compatibility] = Compatibility()

    @classmethod
    def of(cls, parameter: str | None) -> Self:
        """Return the stage with the parameter after `=` in a codec, if any. Raises CodecError."""
        if parameter is not None:
            raise CodecError("codec-parameter", f"stage {cls.name} takes no parameter: remove {parameter[:32]!r}")
        return cls()

    @abstractmethod
    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        """Return the layout of `encode`'s result for an array of this layout. Raises CodecError if unsupported."""

    @abstractmethod
    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        """Return the encoding of `values`, flat."""

    @abstractmethod
    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        """Return the inverse of `encode`, an array of `layout`, and allocate no more than that. Raises CodecError."""

    def packed(self, encoded: Array, layout: ArrayLayout) -> Array | Steps:
        """Return `decode` of differences, in a form that is cheaper to add to a sum if there is one."""
        return self.decode(encoded, layout, encoded)


def floats_only(stage: type[Stage], layout: ArrayLayout) -> ArrayLayout:
    """Return the layout if it is that of differences. Raises CodecError otherwise."""
    if layout.dtype != F32:
        raise CodecError(
            "codec-type", f"stage {stage.name} takes differences as float32: put it directly after delta"
        )
    return layout
