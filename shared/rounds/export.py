"""A version as one safetensors file, streamed tensor by tensor, and the other files of its model folder."""

import json
from collections.abc import Callable, Iterator

from tessera.shared.methods.base import State
from tessera.shared.model.blocks import Block, assembled, whole_shapes
from tessera.shared.model.config_safety import require_safe
from tessera.shared.model.preprocessing import require_file
from tessera.shared.model.spec import BLOCKS_FILE, Model, stored_name
from tessera.shared.tensors.lazy import as_bytes, to_array
from tessera.shared.updates.model_folder import CONFIG_FILE
from tessera.shared.updates.safetensors_file import header_bytes

MODEL_FOLDER, VERSION_FILE, ROOT_FILE = "model", "version.json", "version-root.json"
"""Names in a run's dossier: the model folder, the version's manifest, and the manifest that it names as its root."""
CRATE_FILE = "ro-crate-metadata.json"


class Export:
    """The weights of a version, without an external base. Their size is known before any of them is read."""

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


def small_files(model: Model, read: Callable[[str, int], bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a model folder but the weights. `read` returns a blob by its digest
    and size in bytes.

    Raises Invalid for unsafe settings of the model, its tokenizer or image processor.
    """
    require_safe(model.config)
    yield BLOCKS_FILE, f"{model.model_dump_json(indent=1)}\n".encode()
    yield CONFIG_FILE, f"{json.dumps(model.config, indent=2)}\n".encode()
    for name, ref in model.preprocessing.items():
        raw = read(ref.digest, ref.nbytes)
        require_file(name, raw)
        yield name, raw
