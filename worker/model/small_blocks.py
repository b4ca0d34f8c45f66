"""Many small blocks of a model, read or written at once: an operation for each takes longer than its bytes."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import PIECE, Array
from tessera.worker.model.block_map import numpy_view, torch_view
from tessera.worker.model.build import read_block, tensor_of


def read_blocks(tensors: Mapping[str, Tensor], blocks: Iterable[Block]) -> dict[str, Array]:
    """Return copies of the blocks by name, as `read_block` does. Those of small tensors on the CPU share memory.

    Raises ModelMismatch if `tensors` do not contain a block.
    """
    wanted = list(blocks)
    small: dict[DType, list[Block]] = {}
    for block in wanted:
        if block.part is None and block.numel <= PIECE and tensor_of(tensors, block).device.type == "cpu":
            small.setdefault(block.dtype, []).append(block)
    read: dict[str, Array] = {}
    for group in small.values():
        joined = torch.cat([tensors[block.tensor].detach().reshape(-1) for block in group])
        flat, at = numpy_view(joined), 0
        for block in group:
            read[block.name] = flat[at : at + block.numel].reshape(block.shape)
            at += block.numel
    return {block.name: read[block.name] if block.name in read else read_block(tensors, block) for block in wanted}


def write_blocks(tensors: Mapping[str, Tensor], data: Iterable[tuple[Block, bytes]]) -> bool:
    """Overwrite whole tensors on the CPU with the bytes of each. Return whether all values are finite.

    Raises ModelMismatch if `tensors` do not contain a block.
    """
    groups: dict[DType, list[tuple[Block, bytes]]] = {}
    for block, values in data:
        groups.setdefault(block.dtype, []).append((block, values))
    return all(_write_group(tensors, dtype, group) for dtype, group in groups.items())


def _write_group(tensors: Mapping[str, Tensor], dtype: DType, group: Sequence[tuple[Block, bytes]]) -> bool:
    flat: Array = np.frombuffer(bytearray().join(values for _, values in group), NUMPY_DTYPES[dtype])
    whole = torch_view(flat)
    with torch.no_grad():
        for (block, _), part in zip(group, torch.split(whole, [block.numel for block, _ in group]), strict=True):
            tensor_of(tensors, block).copy_(part.view(block.shape))
    return bool(np.isfinite(flat).all())
