"""The layers of a model, found in its block table: what SAFL chooses among, and what attention is measured by.

A layer is all that a stack of the model holds under one number, and its name is the stack's path with that number. An
encoder-decoder or a model of two towers has several stacks, each with a layer 0. Layers that share their tensors are
one. Blocks without a layer (embeddings, the last norm, the head) are in none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tessera.shared.model.blocks import Block


@dataclass(frozen=True)
class Layer:
    """One layer of one stack, with its blocks in the table's order."""

    stack: str
    index: int
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return f"{self.stack}.{self.index}" if self.stack else str(self.index)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


def layers_of(blocks: Iterable[Block]) -> tuple[Layer, ...]:
    """Return the layers that the blocks are in: stacks in the order in which the table names them, layers by
    number."""
    stacks: dict[str, dict[int, list[Block]]] = {}
    for block in blocks:
        if block.layer is not None:
            stacks.setdefault(stack_of(block), {}).setdefault(block.layer, []).append(block)
    return tuple(
        Layer(stack, index, tuple(held)) for stack, layers in stacks.items() for index, held in sorted(layers.items())
    )


def stack_of(block: Block) -> str:
    """Return the path of the stack that the block's layer is counted in: its tensor's name up to the layer's number.

    A mapping may take the number from the middle of a name. Then the name tells of no stack, and the path is empty.
    """
    steps = block.tensor.split(".")
    number = str(block.layer)
    return ".".join(steps[: steps.index(number)]) if number in steps else ""
