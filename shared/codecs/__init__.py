"""How a block is written for the wire: named stages in a row, such as `delta+shuffle+zstd`.

A block is encoded chunk by chunk (`tensors.CHUNK` elements), each chunk on its own behind its length in four bytes,
so that both ends stream. `raw` is the block's own bytes. A new codec is a new file here with a `STAGE`.
"""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO

import numpy as np

from shared.blocks import NUMPY_DTYPES, Block
from shared.codecs.stage import CodecError, Layout, Stage
from shared.tensors import Array, Tensor, as_bytes, chunk_counts

RAW = "raw"
LOSSLESS = "delta+shuffle+zstd"
"""Exact, and the smallest of those measured: bit-pattern difference, byte planes, zstd level 1."""

WORTH = 0.95
"""A codec is kept for a block only if it brings its first chunk below this share of its size."""

STAGES: dict[str, Stage] = {
    module.STAGE.name: module.STAGE
    for info in pkgutil.iter_modules(__path__)
    if hasattr(module := importlib.import_module(f"{__name__}.{info.name}"), "STAGE")
}


@lru_cache
def stages(codec: str) -> tuple[Stage, ...]:
    """The stages that a codec names.

    Raises CodecError naming the unknown ones and those there are, or saying why they cannot stand in this row.
    """
    names = [] if codec == RAW else codec.split("+")
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise CodecError(f"codec {codec!r} has unknown stages {unknown}; there are raw, {', '.join(sorted(STAGES))}")
    if len(set(names)) < len(names):
        # A sender chooses the codec of its blocks: a thousand stages in a row would cost a thousand passes.
        raise CodecError(f"codec {codec[:64]!r} names a stage twice")
    line = tuple(STAGES[name] for name in names)
    _layouts(line, Layout(1, NUMPY_DTYPES["F32"]))
    return line


def encode(codec: str, tensor: Tensor, base: Tensor) -> Iterator[bytes | memoryview]:
    """The encoded bytes of `tensor`, piece by piece, given the version's own value of it."""
    line = stages(codec)
    for chunk, start in zip(tensor.chunks(), base.chunks(), strict=True):
        if not line:
            yield as_bytes(chunk)
            continue
        piece = as_bytes(_encode_chunk(line, chunk, start))
        yield struct.pack("<I", len(piece))
        yield piece


__all__ = ["LOSSLESS", "RAW", "STAGES", "CodecError", "decode", "encode", "longest", "stages", "worthwhile"]


def _encode_chunk(line: tuple[Stage, ...], chunk: Array, base: Array) -> Array:
    for stage in line:
        chunk = stage.encode(chunk, base)
    return chunk


def worthwhile(codec: str, tensor: Tensor, base: Tensor) -> str:
    """`codec` if it shrinks the first chunk enough to be worth undoing, else `raw`."""
    line = stages(codec)
    if not line or (chunk := next(tensor.chunks(), None)) is None:
        return RAW
    encoded = _encode_chunk(line, chunk, next(base.chunks()))
    return codec if encoded.nbytes + 4 < WORTH * chunk.nbytes else RAW


def longest(nbytes: int) -> int:
    """The most bytes that a block of `nbytes` may take once encoded: incompressible data grows a little."""
    return nbytes + nbytes // 64 + 1_024


def decode(codec: str, block: Block, base: Tensor, file: BinaryIO, nbytes: int) -> Iterator[Array]:
    """Yields the chunks of `block` from `nbytes` encoded bytes at the file's position.

    Never reads or makes more than the block's own shape allows, whatever the bytes say of themselves.
    Raises CodecError if they are not exactly one block.
    """
    line = stages(codec)
    dtype = NUMPY_DTYPES[block.dtype]
    left = nbytes
    for count, start in zip(chunk_counts(block.numel), base.chunks(), strict=True):
        layouts = _layouts(line, Layout(count, dtype))
        length = count * dtype.itemsize
        if line:
            (length,) = struct.unpack("<I", _exactly(file, 4, left))
            left -= 4
            # Bounded by the chunk, not by the block: what is read is held at once.
            if left >= length > longest(count * dtype.itemsize):
                raise CodecError(f"a chunk of {count} elements claims {length} bytes")
        piece = np.frombuffer(_exactly(file, length, left), dtype=np.uint8)
        left -= length
        yield _decode_chunk(line, layouts, piece, start)
    if left:
        raise CodecError(f"{left} bytes are left over behind the last chunk")


def _layouts(line: tuple[Stage, ...], layout: Layout) -> list[Layout]:
    """What each stage is handed when encoding, which is what it must give back when decoding.

    Raises CodecError if a stage cannot take what the one before it gives.
    """
    layouts = [layout]
    for stage in line:
        if layouts[-1].size < 0:
            # Its decoding would have no bound: what a frame unpacks to is known only from the layout.
            raise CodecError(f"stage {stage.name} cannot follow one whose size depends on the data")
        layouts.append(stage.layout(layouts[-1]))
    return layouts


def _decode_chunk(line: tuple[Stage, ...], layouts: list[Layout], piece: Array, base: Array) -> Array:
    size, dtype = layouts[-1]
    if size >= 0 and piece.nbytes != size * dtype.itemsize:
        raise CodecError(f"a chunk has {piece.nbytes} bytes, not {size * dtype.itemsize}")
    values = piece.view(dtype)
    for stage, layout in zip(reversed(line), reversed(layouts[:-1]), strict=True):
        values = stage.decode(values, layout, base)
        if (values.size, values.dtype) != layout:
            raise CodecError(f"stage {stage.name} gave {values.size} x {values.dtype}, not {layout}")
    return values


def _exactly(file: BinaryIO, count: int, left: int) -> bytes:
    if count > left:
        raise CodecError(f"a chunk claims {count} bytes where {left} are left")
    data = file.read(count)
    if len(data) != count:
        raise CodecError(f"the bytes end {count - len(data)} short")
    return bytes(data)
