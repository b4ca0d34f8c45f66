"""Model folders: transformers' own layout (`config.json`, `model.safetensors`) with a table of blocks.

Requires no torch: blocks are slices of the file's bytes.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import ValidationError

from tessera.shared.model.blocks import Block, whole_shapes
from tessera.shared.model.preprocessing import FileName, read_files
from tessera.shared.model.spec import BLOCKS_FILE, WEIGHTS_FILE, Head, Model, stored_name
from tessera.shared.problems import Fault, Invalid, faults_of
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.safetensors_file import ContainerError, Header, read_header

REMEDY = "Create the folder again with `tessera model init`."
CREATE = "Create it with `tessera model init`, or name another."
CONFIG_FILE = "config.json"

HEADS: dict[str, Head] = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForConditionalGeneration": "seq2seq-lm",
}
"""The head of a model whose class, in its config, has a name that ends so."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose weights match its table of blocks."""

    path: Path
    model: Model
    header: Header

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder. Raises Invalid naming an unreadable file, or all missing, unexpected and changed tensors."""
        file = path / BLOCKS_FILE
        try:
            model = Model.model_validate_json(file.read_bytes())
            file = path / WEIGHTS_FILE
            with file.open("rb") as opened:
                header = read_header(opened, file.stat().st_size)
        except OSError as fault:
            if not path.exists():
                raise Invalid(f"there is no folder {path}", remedy=CREATE) from None
            if not path.is_dir():
                raise Invalid(f"{path} is a file, not a model's folder", remedy=CREATE) from None
            if (path / CONFIG_FILE).exists() and not (path / BLOCKS_FILE).exists():
                raise Invalid(
                    f"{path} is a folder of transformers without Tessera's table of blocks", remedy=_command_for(path)
                ) from None
            raise Invalid(f"{file} cannot be read: {fault.strerror}", remedy=REMEDY) from fault
        except ValidationError as fault:
            raise Invalid(
                f"{file} is not a table of blocks", errors=faults_of(fault, model=Model), remedy=REMEDY
            ) from None
        except ContainerError as fault:
            raise Invalid(f"{file} is not a well-formed safetensors file: {fault}", remedy=REMEDY) from fault
        if faults := list(_faults(model, header)):
            raise Invalid(f"{path}: the weights do not match the table of blocks", errors=faults, remedy=REMEDY)
        return cls(path, model, header)

    def block_bytes(self, block: Block) -> memoryview:
        """Return the block's bytes as they are stored and sent: little-endian, C order. A whole tensor is not
        copied."""
        entry = self.header.entries[stored_name(block.tensor)]
        tensor: Array = np.memmap(
            self.path / WEIGHTS_FILE,
            dtype=NUMPY_DTYPES[block.dtype],
            mode="r",
            offset=self.header.data_start + entry.start,
            shape=entry.shape,
        )
        if block.part:
            tensor = np.take(tensor, block.part.index(), axis=block.part.axis)
        return as_bytes(tensor)

    def blocks(self) -> Iterator[tuple[Block, memoryview]]:
        """Yield each block with its bytes, in the table's order, but those of an external base."""
        for block in self.model.stored:
            yield block, self.block_bytes(block)

    def files(self) -> dict[FileName, bytes]:
        """Return the files of the tokenizer and image processor, reduced to the keys that may travel. Raises
        Invalid."""
        return read_files(self.path)


def _faults(model: Model, header: Header) -> Iterator[Fault]:
    dtypes = {block.tensor: block.dtype for block in model.blocks}
    tensors = {stored_name(name): (dtypes[name], shape) for name, shape in whole_shapes(model.stored).items()}
    for name in sorted({*tensors, *header.entries}):
        entry, expected = header.entries.get(name), tensors.get(name)
        if entry is None:
            yield Fault(pointer=name, detail="is not in the weights")
        elif expected is None:
            yield Fault(pointer=name, detail="is in the weights and not in the table")
        elif (entry.dtype, entry.shape) != expected:
            dtype, shape = expected
            stored = f"{entry.dtype} {list(entry.shape)}"
            yield Fault(pointer=name, detail=f"is {stored} in the weights and {dtype} {list(shape)} in the table")


def head_of(path: Path) -> Head:
    """Return the head of the model in a folder of transformers, by the class that its config names."""
    try:
        config = json.loads((path / CONFIG_FILE).read_bytes())
        made_by = str(config.get("architectures", [""])[0])
        dual = {"text_config", "vision_config"} <= config.keys()
    except (OSError, ValueError, AttributeError, TypeError, LookupError):
        made_by, dual = "", False
    return next((head for end, head in HEADS.items() if made_by.endswith(end)), "contrastive" if dual else "features")


def _command_for(path: Path) -> str:
    """Return a remedy with the command that makes a model folder of a folder of transformers."""
    head = head_of(path)
    words = ("tessera", "model", "init", f"{path}-tessera", "--config", str(path), "--head", head)
    return f"Create a model folder from it, and name that one: `{shlex.join(words)}`"
