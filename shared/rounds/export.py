"""A version as one safetensors file, streamed tensor by tensor. An external base is not part of it."""

from collections.abc import Iterator

import numpy as np

from tessera.shared.methods.base import State
from tessera.shared.model.blocks import Block, whole_shapes
from tessera.shared.model.spec import Model, stored_name
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import as_bytes, to_array
from tessera.shared.updates.safetensors_file import header_bytes


class Export:
    """The file's size is known before any of it is read."""

    def __init__(self, state: State, model: Model) -> None:
        self._state = state
        self._shapes = whole_shapes(model.stored)
        self._blocks: dict[str, list[Block]] = {}
        for block in model.stored:
            self._blocks.setdefault(block.tensor, []).append(block)
        shapes = self._shapes.items()
        layout = [(stored_name(name), self._blocks[name][0].dtype, shape) for name, shape in shapes]
        self._header = header_bytes(layout, {"format": "pt"})
        self.nbytes = len(self._header) + model.stored_bytes

    def pieces(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for tensor, blocks in self._blocks.items():
            if blocks[0].part is None:
                yield from map(as_bytes, self._state.model[blocks[0].name].chunks())
            else:
                yield as_bytes(self._assembled(self._shapes[tensor], blocks))

    def _assembled(self, shape: tuple[int, ...], blocks: list[Block]) -> np.ndarray:
        """Return a tensor put together from its parts; the one place that holds a whole tensor."""
        whole = np.empty(shape, NUMPY_DTYPES[blocks[0].dtype])
        for block in blocks:
            if block.part:
                where = (slice(None),) * block.part.axis + (block.part.index(),)
                whole[where] = to_array(self._state.model[block.name])
        return whole
