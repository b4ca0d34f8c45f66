"""What a codec's stage promises."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Self

import numpy as np

from tessera.shared.tensors.lazy import Array, Steps
from tessera.shared.updates.errors import Malformed

F32 = np.dtype("<f4")
U8 = np.dtype(np.uint8)


class CodecError(Malformed):
    """Bytes that are not what their codec says, or a codec that there is not."""


class ArrayLayout(NamedTuple):
    """A flat array's size and element type. A size of -1 depends on the data."""

    size: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return self.size * int(self.dtype.itemsize)


class Stage:
    """Writes a flat array in another way, chunk by chunk. `base` is the version's own chunk, for a first stage."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    drops: ClassVar[bool] = False
    """Whether it leaves out some of what it is given, rather than rounding all of it without bias: what it leaves out
    is kept at the site and added to what the next round sends (error feedback)."""

    reads_base: ClassVar[bool] = False
    """Whether it needs the version's own chunk, and so comes first."""

    @classmethod
    def of(cls, parameter: str | None) -> Self:
        """Return the stage with what follows its name behind '='. Raises CodecError."""
        if parameter is not None:
            raise CodecError(
                "codec-parameter", f"stage {cls.name} takes no parameter, and was given {parameter[:32]!r}"
            )
        return cls()

    @abstractmethod
    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        """Return the layout of what `encode` returns for an array of this layout. Raises CodecError if it takes
        none."""

    @abstractmethod
    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        """`values`, flat, written in this stage's way."""

    @abstractmethod
    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        """Return the inverse of `encode`, giving an array of `layout`. Raises CodecError; never makes more than
        that."""

    def packed(self, encoded: Array, layout: ArrayLayout) -> Array | Steps:
        """As `decode`, of differences: as they were sent, where that adds to a sum for less."""
        return self.decode(encoded, layout, encoded)

    def bound(self, values: Array, base: Array) -> Array:
        """Return the most by which each element may come out different from `values`, float64. 0 if lossless."""
        if not self.lossless:
            raise NotImplementedError(self.name)
        return np.zeros(values.size)


def floats_only(stage: type[Stage], layout: ArrayLayout) -> ArrayLayout:
    """Return the layout, if it is one of differences. Raises CodecError."""
    if layout.dtype != F32:
        raise CodecError("codec-type", f"stage {stage.name} takes differences as float32: put it right behind delta")
    return layout
