"""Reads a model folder: transformers' own layout (`config.json`, `model.safetensors`) with a table of its blocks.

Needs no torch: blocks are slices of the file's bytes, made with numpy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import ValidationError

from tessera.shared.model.blocks import Block, whole_shapes
from tessera.shared.model.spec import BLOCKS_FILE, WEIGHTS_FILE, Model, stored_name
from tessera.shared.problems import Fault, Invalid, faults_of
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.safetensors_file import ContainerError, Header, read_header

REMEDY = "Create the folder again with `tessera model init`."


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose weights were found to be those that its table of blocks describes."""

    path: Path
    model: Model
    header: Header

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raise Invalid naming what cannot be read, or every tensor that is missing, unexpected or of other form."""
        model = _read_model(path / BLOCKS_FILE)
        header = _read_header(path / WEIGHTS_FILE)
        faults = list(_faults(_tensors(model), header))
        if faults:
            raise Invalid(f"{path}: the weights are not those of the table of blocks", errors=faults, remedy=REMEDY)
        return cls(path, model, header)

    def block_bytes(self, block: Block) -> memoryview:
        """Return the block's bytes as they are stored and sent: little-endian, C order. A whole tensor is not
        copied."""
        tensor = self._tensor(block)
        if block.part:
            tensor = np.take(tensor, block.part.index(), axis=block.part.axis)
        return as_bytes(tensor)

    def blocks(self) -> Iterator[tuple[Block, memoryview]]:
        """Yield each block with its bytes, in the table's order."""
        for block in self.model.blocks:
            yield block, self.block_bytes(block)

    def _tensor(self, block: Block) -> Array:
        entry = self.header.entries[stored_name(block.tensor)]
        return np.memmap(
            self.path / WEIGHTS_FILE,
            dtype=NUMPY_DTYPES[block.dtype],
            mode="r",
            offset=self.header.data_start + entry.start,
            shape=entry.shape,
        )


def _read_model(file: Path) -> Model:
    try:
        return Model.model_validate_json(file.read_bytes())
    except OSError as fault:
        raise Invalid(f"{file} cannot be read: {fault.strerror}", remedy=REMEDY) from fault
    except ValidationError as fault:
        raise Invalid(f"{file} is not a table of blocks", errors=faults_of(fault), remedy=REMEDY) from None


def _read_header(file: Path) -> Header:
    try:
        with file.open("rb") as opened:
            return read_header(opened, file.stat().st_size)
    except OSError as fault:
        raise Invalid(f"{file} cannot be read: {fault.strerror}", remedy=REMEDY) from fault
    except ContainerError as fault:
        raise Invalid(f"{file} is not a well-formed safetensors file: {fault}", remedy=REMEDY) from fault


def _tensors(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each whole tensor that the blocks make up."""
    dtypes = {block.tensor: block.dtype for block in model.blocks}
    return {stored_name(name): (dtypes[name], shape) for name, shape in whole_shapes(model.blocks).items()}


def _faults(tensors: Mapping[str, tuple[str, tuple[int, ...]]], header: Header) -> Iterator[Fault]:
    for name in sorted({*tensors, *header.entries}):
        entry, wanted = header.entries.get(name), tensors.get(name)
        if entry is None:
            yield Fault(pointer=name, detail="is not in the weights")
        elif wanted is None:
            yield Fault(pointer=name, detail="is in the weights and not in the table")
        elif (entry.dtype, entry.shape) != wanted:
            dtype, shape = wanted
            was = f"{entry.dtype} {list(entry.shape)}"
            yield Fault(pointer=name, detail=f"is {was} in the weights and {dtype} {list(shape)} in the table")
