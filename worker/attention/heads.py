"""The rows of a layer's matrices that belong to each head of its attention."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers.pytorch_utils import Conv1D

from tessera.shared.model.attention_stats import ByHead
from tessera.shared.model.blocks import Block, Layer, Role
from tessera.shared.tensors.lazy import Array


def by_head(model: nn.Module, layer: Layer, path: str, heads: Array) -> dict[str, ByHead]:
    """Return the heads' mass by row (by column in output projections) for the blocks of the attention at `path`.

    `heads` [heads] is each head's mass; a key and value shared by several query heads get the mean of theirs. In
    every family of the block map, a projection's rows are equal runs, one per head. Blocks without such rows are left
    out: latents, norms, tables of positions.
    """
    attention = model.get_submodule(path)
    shared = heads.reshape(-1, _sharing(attention, len(heads))).mean(1)
    by_role: dict[Role, Array] = {"query": heads, "key": shared, "value": shared, "output": heads}
    return {
        block.name: ByHead(axis, np.repeat(mass, block.shape[axis] // len(mass)))
        for role, mass in by_role.items()
        for block, axis in _projections(model, layer, path, role)
        if block.shape[axis] % len(mass) == 0
    }


def _sharing(attention: Any, heads: int) -> int:
    """Return the number of query heads that share a key. Two attribute names cover the families with sharing."""
    groups = int(getattr(attention, "num_key_value_groups", 0)) or heads // getattr(attention, "num_kv_heads", heads)
    return groups if groups and heads % groups == 0 else 1


def _projections(model: nn.Module, layer: Layer, path: str, role: Role) -> list[tuple[Block, int]]:
    """Return the blocks of one role that divide by heads, with the axis along which they do."""
    of_role = [block for block in layer.blocks if block.role == role]
    # Some families keep the output projection in a sibling of the attention.
    below = _under(path, of_role) or (_under(path.rpartition(".")[0], of_role) if role == "output" else [])
    blocks = [(block, axis) for block in below if (axis := _axis(model, block)) is not None]
    blocks = [(block, axis) for block, axis in blocks if block.part] or blocks
    # A smaller matrix of the same role computes a latent or a gate.
    most = max((block.shape[axis] for block, axis in blocks), default=0)
    return [(block, axis) for block, axis in blocks if block.shape[axis] == most]


def _under(path: str, blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if block.tensor.startswith(f"{path}.")]


def _axis(model: nn.Module, block: Block) -> int | None:
    """Return the axis of a projection that divides by heads: its outputs or, for an output projection, its inputs."""
    owner = model.get_submodule(block.tensor.rpartition(".")[0])
    if block.part:
        return block.part.axis
    if isinstance(owner, nn.Embedding) or "norm" in type(owner).__name__.lower():
        return None
    # XLNet has bare tensors [width, heads, head width]; Linear stores [out, in] and Conv1D [in, out].
    bare = not isinstance(owner, nn.Linear | Conv1D)
    if len(block.shape) == 3 and bare:
        return 1
    if len(block.shape) == 1:
        return None if block.role == "output" else 0
    return None if bare else int((block.role == "output") != isinstance(owner, Conv1D))
