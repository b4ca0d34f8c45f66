"""Versions whose steps are small integers, so that the difference between two of them takes a quarter of the bytes.

A run with `download_codec = "int8"` rounds the step of each large block before it commits a version: stochastically,
to 8 bits with a scale for 256 elements (Alistarh et al. 2017, arXiv 1610.02132). Rounding is part of the merge. So
all copies of a version have the same bits, and a difference reproduces them.

Scales are powers of two. The integers can then be computed from the two versions alone, when a worker first requests
their difference, and need not be stored with each version.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.hashing import derive_seed
from tessera.shared.tensors.lazy import Array, Tensor, as_bytes, numel
from tessera.shared.tensors.statistics import is_statistic
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.codecs.delta import difference
from tessera.shared.updates.codecs.quantized import Int8
from tessera.shared.updates.codecs.stage import F32, U8
from tessera.shared.updates.update_file import TrainedBlock, codec_for, write_encoded

CODEC = f"delta+{Int8.name}"

LEAST_ELEMENTS = 4_096
"""The size from which a block is rounded. Smaller ones, such as biases and statistics, hardly count in a download."""

_NEARLY = np.float32(Int8.levels + 0.5)
"""The largest integer of a row, after the step was rounded once more when it was added to the version."""


@dataclass(frozen=True)
class RoundedStep:
    """`moved`, with its step from `base` rounded to 8 bits, stochastically by `seed`: the same each time that it is
    read."""

    base: Tensor
    moved: Tensor
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    def chunks(self) -> Iterator[Array]:
        rng = np.random.Generator(np.random.SFC64(self.seed))
        for start, moved in zip(self.base.chunks(), self.moved.chunks(), strict=True):
            yield _rounded(start, moved, rng)


def rounded(before: Mapping[str, Tensor], after: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the blocks of the next version with the steps of large float32 blocks rounded; others as they are."""
    found = dict(after)
    for name, moved in after.items():
        base = before[name]
        if moved is not base and moved.dtype == "F32" and numel(moved) >= LEAST_ELEMENTS and not is_statistic(name):
            found[name] = RoundedStep(base, moved, derive_seed(seed, "step", name))
    return found


def write_difference(file: BinaryIO, changes: Sequence[TrainedBlock]) -> None:
    """Write the difference between two versions: in 8 bits for each block whose step is one that was rounded, and
    lossless for the others. `file` must be seekable."""
    whole = {change.block.name for change in changes if _is_rounded(change)}
    codecs = {
        change.block.name: CODEC if change.block.name in whole else codec_for(pipeline.LOSSLESS, change)
        for change in changes
    }
    streams = (
        (name, _encoded(change) if name in whole else pipeline.encode(codecs[name], change))
        for change in changes
        for name in [change.block.name]
    )
    write_encoded(file, streams, codecs)


def _rounded(start: Array, moved: Array, rng: np.random.Generator) -> Array:
    steps = _rows(difference(moved, start))
    largest = np.abs(steps).max(axis=1)
    dice = rng.random(steps.shape, dtype=np.float32)
    if not np.isfinite(largest).all():
        return moved
    scales = _scales(largest, np.float32(Int8.levels))
    codes = np.floor(_over(steps, scales) + dice).clip(-Int8.levels, Int8.levels)
    if not codes.any():
        return start
    # Added as `Scaled` adds it: -0.0 becomes 0.0 at both ends.
    value: Array = start + (codes * scales[:, None] + np.float32(0)).reshape(-1)[: start.size]
    return value


def _is_rounded(change: TrainedBlock) -> bool:
    if change.block.dtype != "F32" or change.block.numel < LEAST_ELEMENTS:
        return False
    return all(_codes(value, start) is not None for value, start, _ in change.parts())


def _encoded(change: TrainedBlock) -> Iterator[bytes | memoryview]:
    for value, start, _ in change.parts():
        if (piece := _codes(value, start)) is None:
            raise ValueError(f"{change.block.name} changed while it was read")
        yield struct.pack("<I", piece.nbytes)
        yield as_bytes(piece)


def _codes(value: Array, start: Array) -> Array | None:
    """Return the step between two chunks as `int8` encodes it, or None if that does not give `value` to the bit."""
    steps = _rows(difference(value, start))
    with np.errstate(invalid="ignore", over="ignore"):
        scales = _scales(np.abs(steps).max(axis=1), _NEARLY)
        wanted, starts = _rows(value), _rows(start)
        codes = np.empty(steps.shape, np.int8)
        left = np.ones(len(steps), dtype=bool)
        # Half the scale if the addition rounded the largest integer of the row up beyond the limit.
        for factor in (1.0, 0.5):
            scales = np.where(left, scales * F32.type(factor), scales)
            tried = np.rint(_over(steps[left], scales[left])).clip(-Int8.levels, Int8.levels)
            codes[left] = np.nan_to_num(tried).astype(np.int8)
            again = starts[left] + (codes[left] * scales[left, None] + np.float32(0))
            left[left] = (again.view(np.uint32) != wanted[left].view(np.uint32)).any(axis=1)
            if not left.any():
                return np.concatenate([scales.view(U8), codes.reshape(-1)[: value.size].view(U8)])
    return None


def _rows(values: Array) -> Array:
    """Return the elements in rows with a scale each, the last one filled up with zeros: float32 [rows, 256]."""
    missing = -values.size % Int8.block
    padded = np.concatenate([values, np.zeros(missing, values.dtype)]) if missing else values
    return padded.reshape(-1, Int8.block)


def _scales(largest: Array, levels: np.float32) -> Array:
    """Return for each row the smallest power of two that `levels` times reach its largest step; 0 for steps of 0."""
    mantissas, exponents = np.frexp(largest / levels)
    scales: Array = np.ldexp(np.float32(1), exponents - (mantissas == 0.5))
    return np.where(largest > 0, scales, np.float32(0))


def _over(steps: Array, scales: Array) -> Array:
    return steps / np.where(scales > 0, scales, np.float32(np.inf))[:, None]
