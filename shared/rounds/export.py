"""A version as one safetensors file, streamed tensor by tensor. An external base is not part of it."""

from collections.abc import Iterator

from tessera.shared.methods.base import State
from tessera.shared.model.blocks import Block, assembled, whole_shapes
from tessera.shared.model.spec import Model, stored_name
from tessera.shared.tensors.lazy import as_bytes, to_array
from tessera.shared.updates.safetensors_file import header_bytes


class Export:
    """The file's size is known before any of it is read."""

    def __init__(self, state: State, model: Model) -> None:
        self._state = state
        self._blocks: dict[str, list[Block]] = {}
        for block in model.stored:
            self._blocks.setdefault(block.tensor, []).append(block)
        shapes = whole_shapes(model.stored)
        layout = [(stored_name(name), self._blocks[name][0].dtype, shape) for name, shape in shapes.items()]
        self._header = header_bytes(layout, {"format": "pt"})
        self.nbytes = len(self._header) + model.stored_bytes

    def pieces(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for blocks in self._blocks.values():
            if blocks[0].part is None:
                yield from map(as_bytes, self._state.model[blocks[0].name].chunks())
            else:
                # The one place that holds a whole tensor.
                yield as_bytes(assembled(blocks, lambda block: to_array(self._state.model[block.name])))
