"""Tensors too large to hold at once: streams of flat chunks, and arithmetic on them.

Everything that the coordinator computes is elementwise over blocks, so a tensor is only ever read as flat chunks of
`CHUNK` elements, in order. Merging eight updates of any size then needs memory for a few chunks, not for a model.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import ClassVar, Protocol, cast

import numpy as np

from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType

CHUNK = 1 << 18
"""Elements per chunk: 1 MiB of float32, which stays in a core's cache between the steps of a sum."""

PIECE = 1 << 15
"""Elements that a `ComputedTensor` is handed at a time: 256 KiB of float64, so that its intermediate results stay in
the core's second cache."""

Array = np.ndarray


class Tensor(Protocol):
    """A tensor that can be read again and again, chunk by chunk."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...
    def chunks(self) -> Iterator[Array]:
        """Yield flat arrays of `CHUNK` elements, the last one shorter, in C order and in `dtype`."""
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
class ZeroTensor:
    """A tensor of zeros."""

    shape: tuple[int, ...]
    dtype: DType

    def chunks(self) -> Iterator[Array]:
        return (np.zeros(count, NUMPY_DTYPES[self.dtype]) for count in chunk_counts(prod(self.shape)))


# ---------------------------------------------------------------- tensors that arrive as differences


class Steps(Protocol):
    """A chunk of differences from a base, as they were sent: what adds itself to a sum without being unpacked first.

    A flat array of numbers is one too.
    """

    def __len__(self) -> int: ...
    def add_to(self, total: Array, weight: float) -> None:
        """Add the differences, times `weight`, to `total`. An element that did not change stays as it is."""
        ...


@dataclass(frozen=True)
class ScaledCodes:
    """Small integers, in blocks of `block` elements with a float32 scale each; the last block may be shorter."""

    codes: Array
    scales: Array
    block: int

    def __len__(self) -> int:
        return self.codes.size

    def add_to(self, total: Array, weight: float) -> None:
        scales = self.scales * total.dtype.type(weight)
        steps = self.codes.astype(total.dtype)
        whole = steps.size // self.block
        body = steps[: whole * self.block].reshape(whole, self.block)
        body *= scales[:whole, None]
        if body.size < steps.size:
            steps[body.size :] *= scales[whole]
        total += steps


@dataclass(frozen=True)
class SparseElements:
    """The few elements that changed: their places, each once, and their differences."""

    size: int
    places: Array
    values: Array

    def __len__(self) -> int:
        return self.size

    def add_to(self, total: Array, weight: float) -> None:
        total[self.places] += self.values.astype(total.dtype) * total.dtype.type(weight)


def unpacked(steps: Array | Steps) -> Array:
    """Return the differences themselves, float32."""
    if isinstance(steps, np.ndarray):
        return steps
    total = np.zeros(len(steps), np.float32)
    steps.add_to(total, 1.0)
    return total


class StepSource(Protocol):
    """A tensor that may have been sent as differences from the version's value, which are then had for less.

    A sum of differences from that same value reads `steps` instead of `chunks` where `sent_as_steps` says so.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def sent_as_steps(self) -> bool: ...
    def steps(self) -> Iterator[Array | Steps]:
        """Yield the difference of each chunk."""
        ...


@dataclass(frozen=True)
class StepsOf:
    """The differences of a tensor, where its values would stand."""

    tensor: StepSource
    shape: tuple[int, ...]
    dtype: DType

    def chunks(self) -> Iterator[Array]:
        # Only a `WeightedSum` has such a source, and it knows.
        return cast("Iterator[Array]", self.tensor.steps())


# ---------------------------------------------------------------- tensors that are computed


@dataclass(frozen=True)
class DerivedTensor(ABC):
    """A tensor that follows from others, element by element; nothing is computed until it is read.

    Its sources may be derived in their turn, and several results may share them.
    """

    shape: tuple[int, ...]
    dtype: DType
    sources: tuple[Tensor, ...]

    @abstractmethod
    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        """Compute a chunk into `out` from the same chunk of each source, which it leaves as it is.

        A source that nothing else needs is read when its part is asked for, so a sum that drops each part before the
        next holds one at a time.
        """

    def chunks(self) -> Iterator[Array]:
        return (chunk for (chunk,) in lockstep([self]))


@dataclass(frozen=True)
class ComputedTensor(DerivedTensor):
    """The result of `compute` over its sources, which is handed pieces of them of any length."""

    compute: Callable[[Sequence[Array]], Array]

    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        whole = list(parts)
        for start in range(0, len(out), PIECE):
            out[start : start + PIECE] = self.compute([part[start : start + PIECE] for part in whole])


@dataclass(frozen=True)
class WeightedSum(DerivedTensor):
    """The sum of each sender's difference from a base, times its weight: see `weighted_steps`.

    The first source is the base; each weight belongs to one of the others.
    """

    weights: tuple[float, ...]

    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        base = next(parts).astype(out.dtype, copy=False)
        step = np.empty_like(out)
        # The sum begins at zero, so that it is never -0.0 where nobody changed anything: 0.0 + -0.0 is 0.0.
        out.fill(0)
        for weight, source, part in zip(self.weights, self.sources[1:], parts, strict=True):
            if not isinstance(source, StepsOf):
                np.subtract(part.astype(out.dtype, copy=False), base, out=step)
                np.multiply(step, out.dtype.type(weight), out=step)
            elif isinstance(part, np.ndarray):
                np.multiply(part.astype(out.dtype, copy=False), out.dtype.type(weight), out=step)
            else:
                part.add_to(out, weight)
                continue
            np.add(out, step, out=out)


@dataclass(frozen=True)
class SteppedTensor(DerivedTensor):
    """Its first source less its second, which says by how much: rounded once, to `dtype`."""

    @property
    def step(self) -> DerivedTensor:
        return cast("DerivedTensor", self.sources[1])

    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        start, step = parts
        if start.dtype == step.dtype == out.dtype:
            np.subtract(start, step, out=out)
        else:
            # In what the step is in, for a base of sixteen bits; in float64 where it is asked for unrounded.
            wide = max(step.dtype, out.dtype, key=lambda dtype: dtype.itemsize)
            out[...] = start.astype(wide) - step.astype(wide, copy=False)


@dataclass(frozen=True)
class OverwrittenTensor(SteppedTensor):
    """Moved all the way to its third source, whose bits it takes: what a single sender sent is not rounded again."""

    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        _, _, out[...] = parts


def lockstep(tensors: Sequence[Tensor]) -> Iterator[tuple[Array, ...]]:
    """Read tensors of one size side by side: yields the next chunk of each.

    A common source of several of them is read, and computed, once per chunk, however many need it, and held
    meanwhile. A tensor that one other is computed from is read, or computed, when that one asks for it. Raises
    ValueError if the sizes differ.
    """
    order = _sources_first(tensors)
    if len(sizes := {numel(tensor) for tensor in order}) > 1:
        raise ValueError(f"tensors of different sizes are read side by side: {sorted(sizes)} elements")
    derived = [tensor for tensor in order if isinstance(tensor, DerivedTensor)]
    read = {_identity(tensor): tensor.chunks() for tensor in order if not isinstance(tensor, DerivedTensor)}
    needed = Counter(map(_identity, (*tensors, *(source for tensor in derived for source in tensor.sources))))
    for count in chunk_counts(max(sizes, default=0)):
        yield tuple(map(_chunk_reader(read, needed, count), tensors))
    for chunks in read.values():
        # A decoder checks at the end that no bytes are left over.
        if next(chunks, None) is not None:
            raise ValueError("a tensor has more chunks than its shape allows")


def _chunk_reader(
    read: Mapping[tuple[int, bool], Iterator[Array]], needed: Mapping[tuple[int, bool], int], count: int
) -> Callable[[Tensor], Array]:
    """Return a function from a tensor to its next chunk, of `count` elements. It keeps the chunks that are needed
    several times."""
    kept: dict[tuple[int, bool], Array] = {}

    def chunk_of(tensor: Tensor) -> Array:
        key = _identity(tensor)
        if key in kept:
            return kept[key]
        if isinstance(tensor, DerivedTensor):
            chunk = np.empty(count, NUMPY_DTYPES[tensor.dtype])
            tensor.fill(chunk, map(chunk_of, tensor.sources))
        else:
            chunk = _next_of(read[key], count)
        if needed[key] > 1:
            kept[key] = chunk
        return chunk

    return chunk_of


def _next_of(chunks: Iterator[Array], count: int) -> Array:
    chunk = next(chunks, None)
    if chunk is None or len(chunk) != count:
        raise ValueError(f"a tensor has {0 if chunk is None else len(chunk)} elements in a chunk of {count}")
    return chunk


def _identity(tensor: Tensor) -> tuple[int, bool]:
    """Return the identity of a tensor. The steps of one tensor are computed once for all sums that need them."""
    return (id(tensor.tensor), True) if isinstance(tensor, StepsOf) else (id(tensor), False)


def related(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups, so that those which share a source, however deep, are together: to be read in
    lockstep.

    The order is that given, among groups and within each.
    """
    above: dict[tuple[int, bool], tuple[int, bool]] = {}

    def top(node: tuple[int, bool]) -> tuple[int, bool]:
        while above[node] != node:
            above[node] = node = above[above[node]]
        return node

    for tensor in tensors:
        own = _identity(tensor)
        above.setdefault(own, own)
        below = [tensor]
        for each in below:
            for source in each.sources if isinstance(each, DerivedTensor) else ():
                key = _identity(source)
                if key in above:
                    above[top(own)] = top(key)
                else:
                    above[key] = own
                    below.append(source)
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(top(_identity(tensor)), []).append(tensor)
    return list(groups.values())


def _sources_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors and all of their sources, each once, and after its own sources."""
    found: dict[tuple[int, bool], Tensor] = {}
    _find(tensors, found)
    return list(found.values())


def _find(tensors: Iterable[Tensor], found: dict[tuple[int, bool], Tensor]) -> None:
    for tensor in tensors:
        if _identity(tensor) not in found:
            _find(tensor.sources if isinstance(tensor, DerivedTensor) else (), found)
            found[_identity(tensor)] = tensor


# ---------------------------------------------------------------- sums of differences


@dataclass(frozen=True)
class StretchedStep:
    """As far from `base` as `tensor` is, times `factor`."""

    base: Tensor
    tensor: Tensor
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def chunks(self) -> Iterator[Array]:
        return _moved(self.base, weighted_steps(self.base, [(-self.factor, self.tensor)])).chunks()


@dataclass(frozen=True)
class RebasedTensor:
    """`base` moved by the steps of an update that started from another value."""

    base: Tensor
    update: StepSource
    sent_as_steps: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.update.shape

    @property
    def dtype(self) -> DType:
        return self.update.dtype

    def steps(self) -> Iterator[Array | Steps]:
        return self.update.steps()

    def chunks(self) -> Iterator[Array]:
        return _moved(self.base, weighted_steps(self.base, [(-1.0, self)])).chunks()


def itself(tensor: Tensor) -> ComputedTensor:
    """Return a tensor's values, whichever value it started from."""
    return ComputedTensor(tensor.shape, tensor.dtype, (tensor,), lambda parts: parts[0])


def weighted_steps(base: Tensor, senders: Sequence[tuple[float, Tensor]]) -> WeightedSum:
    """Return the sum of each sender's difference from `base` times its weight, which may be of any sign.

    It runs in the order given, in float32, or in float64 for a base of that (docs/decisions/0019): the same senders
    in the same order give the same bits on every machine, and elements that no sender changed are exactly 0.0.

    Raise ValueError for an update that started from another base and is not `RebasedTensor`: its difference from this
    one would undo the changes in between.
    """
    weights: list[float] = []
    sources: list[Tensor] = [base]
    for weight, sent in senders:
        factor, tensor = weight, sent
        while isinstance(tensor, StretchedStep):
            factor, tensor = factor * tensor.factor, tensor.tensor
        if _name(getattr(tensor, "base", base)) != _name(base):
            raise ValueError(f"an update of {_name(base)} started from {_name(getattr(tensor, 'base', base))}")
        weights.append(factor)
        if getattr(tensor, "sent_as_steps", False):
            sources.append(StepsOf(cast("StepSource", tensor), sent.shape, sent.dtype))
        else:
            sources.append(tensor)
    return WeightedSum(base.shape, "F64" if base.dtype == "F64" else "F32", tuple(sources), tuple(weights))


def _name(tensor: Tensor) -> str | None:
    """Return the digest of a stored tensor; None for one that is only in memory."""
    return getattr(tensor, "digest", None)


def mean_step(base: Tensor, senders: Sequence[tuple[float, Tensor]], whole: float | None = None) -> SteppedTensor:
    """Return `base` plus the weighted sum of each sender's difference from it, divided by `whole` (default: the sum
    of the weights).

    With the default this is the senders' weighted mean; with the weight of a whole cohort it is a step damped by
    the share that sent. A block that no sender changed comes out bit for bit as it was.

    Raises ValueError if a weight is not positive or a shape differs.
    """
    if any(weight <= 0 for weight, _ in senders):
        raise ValueError(f"weights must be positive: {[weight for weight, _ in senders]}")
    if any(tensor.shape != base.shape for _, tensor in senders):
        raise ValueError(f"shapes differ from {base.shape}: {[tensor.shape for _, tensor in senders]}")
    total = sum(weight for weight, _ in senders) if whole is None else whole
    # Summed with the sign turned and then subtracted, because x - 0.0 is x for every x, while -0.0 + 0.0 is 0.0.
    moved = _moved(base, weighted_steps(base, [(-weight / total, tensor) for weight, tensor in senders]))
    if len(senders) == 1 and senders[0][0] == total and moved.step.sources[1:] == (senders[0][1],):
        return OverwrittenTensor(base.shape, base.dtype, (*moved.sources, senders[0][1]))
    return moved


def _moved(base: Tensor, step: Tensor) -> SteppedTensor:
    return SteppedTensor(base.shape, base.dtype, (base, step))


def to_array(tensor: Tensor) -> Array:
    """Return the whole tensor, in its shape and dtype. For small tensors and tests: it holds all of it."""
    empty = np.empty(0, dtype=NUMPY_DTYPES[tensor.dtype])
    return np.concatenate([empty, *tensor.chunks()]).reshape(tensor.shape)


def chunk_counts(numel: int) -> Iterator[int]:
    """Yield the number of elements in each chunk of a tensor with `numel` elements."""
    for start in range(0, numel, CHUNK):
        yield min(CHUNK, numel - start)


def numel(tensor: Tensor) -> int:
    return prod(tensor.shape)


def squares(steps: Array) -> float:
    """Return the sum of squares of float32 elements, infinite or NaN if one is or the sum overflows.

    Each row is summed as float32, and the rows as float64: seven times as fast as float64 throughout, and off by a
    few parts in 10^8.
    """
    whole = steps.size - steps.size % _ROW
    rest = steps[whole:]
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.vecdot(rest, rest))
        if whole:
            rows = steps[:whole].reshape(-1, _ROW)
            found += float(np.vecdot(rows, rows).sum(dtype=np.float64))
        if not isfinite(found):
            wide = steps.astype(np.float64)
            found = float(np.einsum("i,i", wide, wide))
    return found


_ROW = 1 << 12
"""Short enough that BLAS leaves a row to one thread: several would spin while they wait for each other."""


def as_bytes(chunk: Array) -> memoryview:
    """Return the chunk's bytes as they are stored and sent: little-endian, C order, without a copy where it can
    be."""
    # The view as uint8 is for bfloat16, which does not speak the buffer protocol.
    return np.ascontiguousarray(chunk).view(np.uint8).data.cast("B")


def from_bytes(data: bytes | memoryview, dtype: DType) -> Array:
    """Return the inverse of `as_bytes`: a flat, read-only array over `data`."""
    return np.frombuffer(data, dtype=NUMPY_DTYPES[dtype])


def digest_of(data: bytes | memoryview) -> str:
    """Return the name of these bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
