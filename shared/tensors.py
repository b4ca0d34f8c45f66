"""Tensors too large to hold at once: streams of flat chunks, and arithmetic on them.

Everything that the coordinator computes is elementwise over blocks, so a tensor is only ever read as flat chunks of
`CHUNK` elements, in order. What merges eight updates of any size then needs memory for a few chunks, not for a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from shared.blocks import NUMPY_DTYPES, DType

CHUNK = 1 << 18
"""Elements per chunk: 1 MiB of float32, which stays in a core's cache between the steps of a sum."""

PIECE = 1 << 15
"""Elements that are computed at a time: 256 KiB of float64, so that what a sum needs of each of its steps is still in
the core's second cache. Five to ten times as fast as whole chunks."""

Array = np.ndarray


class Tensor(Protocol):
    """A tensor that can be read again and again, chunk by chunk."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...
    def chunks(self) -> Iterator[Array]:
        """Yields flat arrays of `CHUNK` elements, the last one shorter, in C order and in `dtype`."""
        ...


@dataclass(frozen=True)
class ArrayTensor:
    """A tensor held in memory."""

    values: Array
    dtype: DType = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def chunks(self) -> Iterator[Array]:
        flat = np.ascontiguousarray(self.values, dtype=NUMPY_DTYPES[self.dtype]).reshape(-1)
        for start in range(0, flat.size, CHUNK):
            yield flat[start : start + CHUNK]


@dataclass(frozen=True)
class Computed:
    """The result of `compute` over its sources, element by element; nothing is computed until it is read.

    `compute` is handed pieces of its sources of any length. Sources may be computed in their turn, and several
    results may share them, so it leaves the pieces as they are.
    """

    shape: tuple[int, ...]
    dtype: DType
    sources: tuple[Tensor, ...]
    compute: Callable[[Sequence[Array]], Array]

    def chunks(self) -> Iterator[Array]:
        return (chunk for (chunk,) in lockstep([self]))


def lockstep(tensors: Sequence[Tensor]) -> Iterator[tuple[Array, ...]]:
    """Reads tensors of one size side by side: yields the next chunk of each.

    What several of them are computed from is read, and computed, once per chunk, however many need it. A chunk of
    each is held at a time, and of each of their sources. Raises ValueError if the sizes differ.
    """
    order = _sources_first(tensors)
    computed = [tensor for tensor in order if isinstance(tensor, Computed)]
    read = [tensor for tensor in order if not isinstance(tensor, Computed)]
    wanted = {id(tensor) for tensor in tensors}
    for parts in zip(*(tensor.chunks() for tensor in read), strict=True):
        at_hand = {id(tensor): part for tensor, part in zip(read, parts, strict=True)}
        results = {
            id(tensor): np.empty(len(parts[0]), NUMPY_DTYPES[tensor.dtype])
            for tensor in computed
            if id(tensor) in wanted
        }
        for start in range(0, len(parts[0]), PIECE):
            piece = {node: part[start : start + PIECE] for node, part in at_hand.items()}
            for tensor in computed:
                result = tensor.compute([piece[id(source)] for source in tensor.sources])
                piece[id(tensor)] = result.astype(NUMPY_DTYPES[tensor.dtype], copy=False)
            for node, whole in results.items():
                whole[start : start + PIECE] = piece[node]
        at_hand |= results
        yield tuple(at_hand[id(tensor)] for tensor in tensors)


def related(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups, so that those which share a source, however deep, are together: to be read in lockstep.

    The order is that given, among groups and within each.
    """
    above: dict[int, int] = {}

    def top(node: int) -> int:
        while above[node] != node:
            above[node] = node = above[above[node]]
        return node

    for tensor in tensors:
        for source in _sources_first([tensor]):
            above.setdefault(id(source), id(source))
            above[top(above.setdefault(id(tensor), id(tensor)))] = top(id(source))
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(top(id(tensor)), []).append(tensor)
    return list(groups.values())


def _sources_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors and all that they are computed from, each once, every one after its sources."""
    found: dict[int, Tensor] = {}

    def visit(tensor: Tensor) -> None:
        if id(tensor) not in found:
            for source in tensor.sources if isinstance(tensor, Computed) else ():
                visit(source)
            found[id(tensor)] = tensor

    for tensor in tensors:
        visit(tensor)
    return list(found.values())


def mean_step(base: Tensor, senders: Sequence[tuple[float, Tensor]], whole: float | None = None) -> Tensor:
    """`base` plus the weighted sum of each sender's difference from it, over `whole` (default: the weights' sum).

    With the default this is the senders' weighted mean; with the weight of a whole cohort it is a step damped by
    the share that sent. The sum runs in float64 in the order given, so the same senders in the same order give the
    same bits; and a block that no sender changed comes out bit for bit as it was.

    Raises ValueError if a weight is not positive or a shape differs.
    """
    if any(weight <= 0 for weight, _ in senders):
        raise ValueError(f"weights must be positive: {[weight for weight, _ in senders]}")
    if any(tensor.shape != base.shape for _, tensor in senders):
        raise ValueError(f"shapes differ from {base.shape}: {[tensor.shape for _, tensor in senders]}")
    total = sum(weight for weight, _ in senders) if whole is None else whole
    shares = [weight / total for weight, _ in senders]

    def step(parts: Sequence[Array]) -> Array:
        start = parts[0].astype(np.float64)
        moved = start.copy()
        for share, part in zip(shares, parts[1:], strict=True):
            # Subtracted, because x - 0.0 is x for every x, while -0.0 + 0.0 is 0.0.
            moved -= share * (start - part.astype(np.float64))
        return moved

    return Computed(base.shape, base.dtype, (base, *(tensor for _, tensor in senders)), step)


def stretched(base: Tensor, tensor: Tensor, factor: float) -> Computed:
    """As far from `base` as `tensor` is, times `factor`, in float64."""

    def stretch(parts: Sequence[Array]) -> Array:
        start, end = (part.astype(np.float64) for part in parts)
        moved: Array = start - factor * (start - end)
        return moved

    return Computed(base.shape, "F64", (base, tensor), stretch)


def weighted_steps(base: Tensor, senders: Sequence[tuple[float, Tensor]]) -> Computed:
    """The sum of each sender's difference from `base` times its weight, in float64. Weights may be of any sign."""

    def total(parts: Sequence[Array]) -> Array:
        start = parts[0].astype(np.float64)
        summed = np.zeros_like(start)
        for (weight, _), part in zip(senders, parts[1:], strict=True):
            summed += weight * (part.astype(np.float64) - start)
        return summed

    return Computed(base.shape, "F64", (base, *(tensor for _, tensor in senders)), total)


def to_array(tensor: Tensor) -> Array:
    """The whole tensor, in its shape and dtype. For small tensors and tests: it holds all of it."""
    empty = np.empty(0, dtype=NUMPY_DTYPES[tensor.dtype])
    return np.concatenate([empty, *tensor.chunks()]).reshape(tensor.shape)


def chunk_counts(numel: int) -> Iterator[int]:
    """The number of elements in each chunk of a tensor with `numel` elements."""
    for start in range(0, numel, CHUNK):
        yield min(CHUNK, numel - start)


def numel(tensor: Tensor) -> int:
    return prod(tensor.shape)


def as_bytes(chunk: Array) -> memoryview:
    """The chunk's bytes as they are stored and sent: little-endian, C order, without a copy where it can be."""
    # The view as uint8 is for bfloat16, which does not speak the buffer protocol.
    return np.ascontiguousarray(chunk).view(np.uint8).data.cast("B")


def from_bytes(data: bytes, dtype: DType) -> Array:
    """The inverse of `as_bytes`: a flat, read-only array over `data`."""
    return np.frombuffer(data, dtype=NUMPY_DTYPES[dtype])


def digest_of(data: bytes | memoryview) -> str:
    """The name of these bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
