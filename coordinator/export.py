"""A version as one safetensors file, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from shared.blocks import NUMPY_DTYPES, Block, DType
from shared.container import DTYPE_BYTES, header_bytes
from shared.methods.contract import State
from shared.model import Model
from shared.tensors import as_bytes, to_array


class Export:
    """The file's size is known before any of it is read."""

    def __init__(self, state: State, model: Model) -> None:
        self._state = state
        self._tensors: dict[str, list[Block]] = {}
        for block in model.blocks:
            self._tensors.setdefault(block.tensor, []).append(block)
        layout = [(name, blocks[0].dtype, _whole_shape(blocks)) for name, blocks in self._tensors.items()]
        self._header = header_bytes(layout, {"format": "pt"})
        self.nbytes = len(self._header) + sum(prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in layout)

    def pieces(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for blocks in self._tensors.values():
            if blocks[0].part is None:
                yield from map(as_bytes, self._state.model[blocks[0].name].chunks())
            else:
                yield as_bytes(self._assembled(blocks))

    def _assembled(self, blocks: list[Block]) -> np.ndarray:
        """A tensor put together from its parts; the one place that holds a whole tensor."""
        dtype: DType = blocks[0].dtype
        whole = np.empty(_whole_shape(blocks), NUMPY_DTYPES[dtype])
        for block in blocks:
            if block.part:
                where = (slice(None),) * block.part.axis + (block.part.index(),)
                whole[where] = to_array(self._state.model[block.name])
        return whole


def _whole_shape(blocks: list[Block]) -> tuple[int, ...]:
    part = blocks[0].part
    if part is None:
        return blocks[0].shape
    rows = sum(block.part.rows for block in blocks if block.part)
    return (*blocks[0].shape[: part.axis], rows, *blocks[0].shape[part.axis + 1 :])
