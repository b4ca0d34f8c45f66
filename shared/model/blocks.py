"""Blocks: the named tensors, or named slices of tensors, that are selected, frozen, sent, averaged and stored.

A model is described by a table of blocks that together cover each of its tensors exactly once. A fused
query/key/value matrix is one tensor and three blocks; everything else is one block per tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, PositiveInt, model_validator

from tessera.shared.schema import Value
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType

Role = Literal[
    "query", "key", "value", "output", "mlp", "norm", "embedding", "head", "prompt", "adapter", "other", "extra",
]  # fmt: skip
"""Function of a block in a transformer. No model has an `extra` block: it is an array that a method sends beside the
model's blocks (`shared.methods.base.ExtraArray`)."""

MAX_BLOCKS = 65_536
MAX_SPANS = 4_096


def _checked_name(name: str) -> str:
    if not name.isprintable() or not name.isascii():
        raise ValueError("a block's name is printable ASCII")
    return name


Name = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_checked_name)]
"""A block's or tensor's name. It is a label only: no name is ever used as a path."""


class TensorSlice(Value):
    """The rows of `axis` of a tensor that a block covers, as half-open spans in ascending order.

    Spans, rather than one range, because some families interleave queries, keys and values head by head.
    """

    label: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")]
    axis: Annotated[int, Field(ge=0, le=7)]
    spans: tuple[tuple[int, int], ...] = Field(min_length=1, max_length=MAX_SPANS)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        end = 0
        for start, stop in self.spans:
            if not end <= start < stop:
                raise ValueError(f"spans of part {self.label!r} must ascend without overlap: {self.spans}")
            end = stop
        return self

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def index(self) -> np.ndarray:
        """Return the covered rows as an integer index, int64 [rows]."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.spans])


class Block(Value):
    """One tensor, or one part of it. `shape` is the block's own: a part's axis counts only its rows."""

    tensor: Name
    part: TensorSlice | None = None
    role: Role
    adapts: tuple[Role, ...] = ()
    """An adapter's: the roles of the matrices that it adds to. Several for a factor that a fused matrix's parts
    share."""
    layer: Annotated[int, Field(ge=0)] | None = None
    shape: tuple[PositiveInt, ...] = Field(max_length=8)
    dtype: DType

    @model_validator(mode="after")
    def _adapters_adapt(self) -> Self:
        if self.adapts and self.role != "adapter":
            raise ValueError(f"block {self.name!r} has role {self.role!r}: only an adapter adapts other roles")
        return self

    @model_validator(mode="after")
    def _part_fits(self) -> Self:
        if self.part and (len(self.shape) <= self.part.axis or self.shape[self.part.axis] != self.part.rows):
            raise ValueError(f"block {self.name!r} has shape {self.shape}, which its part does not fit")
        return self

    @property
    def name(self) -> str:
        return f"{self.tensor}#{self.part.label}" if self.part else self.tensor

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * NUMPY_DTYPES[self.dtype].itemsize


def whole_shapes(blocks: Iterable[Block]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that the blocks make up, in the order in which they first name it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        known = shapes.get(block.tensor)
        if known is None or block.part is None:
            shapes[block.tensor] = block.shape
        else:
            axis = block.part.axis
            shapes[block.tensor] = (*known[:axis], known[axis] + block.part.rows, *known[axis + 1 :])
    return shapes


def assembled(parts: Sequence[Block], values: Callable[[Block], np.ndarray]) -> np.ndarray:
    """Return a whole tensor, put together from the values of its parts."""
    (shape,) = whole_shapes(parts).values()
    whole = np.empty(shape, NUMPY_DTYPES[parts[0].dtype])
    for block in parts:
        if block.part:
            where = (slice(None),) * block.part.axis + (block.part.index(),)
            whole[where] = values(block)
    return whole


def check_table(blocks: Sequence[Block]) -> None:
    """Refuse a table that does not cover each tensor exactly once.

    Raises ValueError naming every duplicate name and every tensor whose parts overlap, leave a gap, or disagree.
    """
    faults: list[str] = []
    by_tensor: dict[str, list[Block]] = {}
    for block in blocks:
        by_tensor.setdefault(block.tensor, []).append(block)
    for tensor, group in sorted(by_tensor.items()):
        parts = [block.part for block in group if block.part]
        if len(group) == 1 and not parts:
            continue
        if len(parts) != len(group):
            faults.append(f"{tensor}: listed both whole and in parts, or twice")
            continue
        rest = {tuple(n for i, n in enumerate(b.shape) if i != b.part.axis) for b in group if b.part}
        spans = sorted(span for part in parts for span in part.spans)
        gapless = spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans))
        alike = len({part.axis for part in parts}) == len({b.dtype for b in group}) == len(rest) == 1
        if not (gapless and alike and len({part.label for part in parts}) == len(parts)):
            faults.append(f"{tensor}: its parts overlap, leave a gap, or differ in axis, dtype or shape")
    if faults:
        raise ValueError("; ".join(faults))


@dataclass(frozen=True)
class Layer:
    """One layer of one stack, with its blocks in the table's order: everything that the stack holds under one number.

    An encoder-decoder or a model of two towers has several stacks, each with a layer 0. Layers that share their
    tensors are one. Blocks without a layer (embeddings, the last norm, the head) are in none.
    """

    stack: str
    index: int
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return f"{self.stack}.{self.index}" if self.stack else str(self.index)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


def layer_key(block: Block) -> tuple[str, int] | None:
    """Return the stack and the number of a block's layer; None outside layers."""
    return None if block.layer is None else (stack_of(block), block.layer)


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


def layer_labels(layers: Sequence[Layer]) -> dict[str, str]:
    """Return a short label of each layer by its name, for metrics: its number, after that of its stack if there are
    several."""
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    single = len(stacks) == 1
    return {each.name: f"{'' if single else f'{stacks.index(each.stack)}.'}{each.index}" for each in layers}


def stack_of(block: Block) -> str:
    """Return the path of the stack that the block's layer is counted in: its tensor's name up to the layer's number.

    A mapping may take the number from the middle of a name. Then the name contains no stack, and the path is empty.
    """
    steps = block.tensor.split(".")
    number = str(block.layer)
    return ".".join(steps[: steps.index(number)]) if number in steps else ""
