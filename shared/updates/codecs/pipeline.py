"""How a block is written for the wire: named stages in a row, such as `bits+shuffle+zstd` or `delta+int8+zstd`.

A block is encoded chunk by chunk (`tensors.CHUNK` elements), each chunk on its own behind its length in four bytes,
so that both ends stream. `raw` is the block's own bytes. A new codec is a new file here with `STAGES`.
"""

import importlib
import pkgutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, Steps, Tensor, as_bytes, chunk_counts, unpacked
from tessera.shared.tensors.mmap_file import taken
from tessera.shared.updates.codecs.lowrank import LowRank
from tessera.shared.updates.codecs.stage import F32, ArrayLayout, CodecError, Stage

RAW = "raw"
LOSSLESS = "bits+shuffle+zstd"
"""Exact, and the smallest of those measured: bit-pattern difference, byte planes, zstd level 1."""

WORTH = 0.95
"""Stages that round nothing are kept for a block only if they bring its first chunk below this share of its size."""

STAGES: dict[str, type[Stage | LowRank]] = {
    stage.name: stage
    for info in pkgutil.iter_modules([str(Path(__file__).parent)])
    if info.name != Path(__file__).stem
    for stage in getattr(importlib.import_module(f"{__package__}.{info.name}"), "STAGES", ())
}


@dataclass(frozen=True)
class Codec:
    """The stages of a row."""

    name: str
    line: tuple[Stage, ...]
    """Those that work chunk by chunk."""
    lowrank: LowRank | None = None

    @property
    def lossless(self) -> bool:
        return all(stage.lossless for stage in self.line)

    @property
    def drops(self) -> bool:
        """Whether what a worker would send is left out in part, and kept for the next round."""
        return self.lowrank is not None or any(stage.drops for stage in self.line)

    @property
    def of_differences(self) -> bool:
        """Whether what is sent are steps from the version, as float32, rather than the bits of new values."""
        return bool(self.line) and self.line[0].name == "delta"


@lru_cache
def parse(codec: str) -> Codec:
    """Return the stages that a codec names.

    Raises CodecError naming the unknown ones and those there are, or saying why they cannot stand in this row.
    """
    parts = [part.partition("=") for part in ([] if codec == RAW else codec.split("+"))]
    names = [name for name, _, _ in parts]
    if unknown := [name for name in names if name not in STAGES]:
        raise CodecError(
            "codec-unknown",
            f"codec {codec!r} has unknown stages {unknown}; there are raw, {', '.join(sorted(STAGES))}",
        )
    if len(set(names)) < len(names):
        # A sender chooses the codec of its blocks: a thousand stages in a row would cost a thousand passes.
        raise CodecError("codec-repeated", f"codec {codec[:64]!r} names a stage twice")
    made = [STAGES[name].of(parameter if equals else None) for name, equals, parameter in parts]
    line = tuple(stage for stage in made if isinstance(stage, Stage))
    lowrank = next((stage for stage in made if isinstance(stage, LowRank)), None)
    if behind := [stage.name for stage in line[1:] if stage.reads_base]:
        raise CodecError("codec-order", f"stage {behind[0]} comes first")
    if names[:1] != ["delta"] and (rounding := [stage.name for stage in made if not stage.lossless]):
        # Half a percent of a weight is more than it moves in a round.
        raise CodecError(
            "codec-order", f"stage {rounding[0]} rounds, and only differences may be rounded: put delta first"
        )
    if lowrank and names.index("lowrank") != 1:
        raise CodecError("codec-order", "stage lowrank comes second, right behind delta")
    _layouts(line, ArrayLayout(1, NUMPY_DTYPES["F32"]))
    return Codec(codec, line, lowrank)


def suited(codec: str, block: Block) -> str:
    """Return the codec without a stage that is of no use to a block of this shape."""
    lowrank = parse(codec).lowrank
    if lowrank is None or lowrank.pays(block.shape):
        return codec
    return "+".join(part for part in codec.split("+") if not part.startswith("lowrank"))


# ---------------------------------------------------------------- encoding


class CodecInput(Protocol):
    """A block's new value beside that of the version, each chunk by chunk, and the difference as float32."""

    @property
    def base(self) -> Tensor: ...
    def values(self) -> Iterator[Array]: ...
    def steps(self) -> Iterator[Array]: ...


def encode(codec: str, change: CodecInput, dice: np.random.Generator | None = None) -> Iterator[bytes | memoryview]:
    """Yield the encoded bytes of a block, piece by piece. Where stages round by chance, `dice` are thrown."""
    made, dice = parse(codec), dice or np.random.default_rng()
    if not made.line:
        yield from map(as_bytes, change.values())
        return
    for piece in _pieces(made, change, dice):
        data = as_bytes(piece)
        yield struct.pack("<I", len(data))
        yield data


def _pieces(made: Codec, change: CodecInput, dice: np.random.Generator) -> Iterator[Array]:
    if made.lowrank:
        factors = made.lowrank.encode(change.steps, change.base.shape, dice)
        return (_encode_chunk(made.line[1:], part, part, dice) for part in _flat_chunks(factors))
    if made.of_differences:
        return (_encode_chunk(made.line[1:], step, step, dice) for step in change.steps())
    both = zip(change.values(), change.base.chunks(), strict=True)
    return (_encode_chunk(made.line, chunk, base, dice) for chunk, base in both)


def _flat_chunks(values: Array) -> Iterator[Array]:
    start = 0
    for count in chunk_counts(values.size):
        yield values[start : start + count]
        start += count


def _encode_chunk(line: tuple[Stage, ...], chunk: Array, base: Array, dice: np.random.Generator) -> Array:
    for stage in line:
        chunk = stage.encode(chunk, base, dice)
    return chunk


def worthwhile(codec: str, change: CodecInput) -> str:
    """Return the codec without the lossless stages at its end, unless they shrink the first chunk enough to be worth
    undoing: `raw` if it has no other."""
    made = parse(codec)
    rounding = max((place + 1 for place, stage in enumerate(made.line) if not stage.lossless), default=0)
    if made.lowrank or rounding == len(made.line):
        return codec
    dice = np.random.default_rng(0)
    without = "+".join(codec.split("+")[:rounding]) or RAW
    plain = next(_pieces(parse(without), change, dice) if rounding else change.values(), None)
    if plain is None:
        return without
    base = next(change.base.chunks())
    full = _encode_chunk(made.line[rounding:], plain, base, dice)
    return codec if full.nbytes + 4 < WORTH * plain.nbytes else without


def longest(codec: str, block: Block) -> int:
    """Return the most bytes that a block may take once encoded: incompressible data grows a little."""
    made = parse(codec)
    if not made.line:
        return block.nbytes
    counts, line = _chunks(made, block)
    start = ArrayLayout(0, F32 if made.lowrank else NUMPY_DTYPES[block.dtype])
    return sum(4 + _longest_chunk(line, start._replace(size=count)) for count in counts)


def _chunks(made: Codec, block: Block) -> tuple[Iterator[int], tuple[Stage, ...]]:
    """Return the elements of each encoded chunk, and the stages that it went through."""
    if made.lowrank:
        return chunk_counts(made.lowrank.size(block.shape)), made.line[1:]
    return chunk_counts(block.numel), made.line


def _longest_chunk(line: tuple[Stage, ...], layout: ArrayLayout) -> int:
    fixed = [each for each in _layouts(line, layout) if each.size >= 0][-1].nbytes
    return fixed + fixed // 64 + 1_024


# ---------------------------------------------------------------- decoding


def decode(codec: str, block: Block, base: Tensor, file: BinaryIO, nbytes: int) -> Iterator[Array]:
    """Yield the chunks of `block` from `nbytes` encoded bytes at the file's position.

    Never reads or make more than the block's own shape allows, whatever the bytes say of themselves.
    Raises CodecError if they are not exactly one block.
    """
    made = parse(codec)
    if made.of_differences:
        delta, layout = made.line[0], ArrayLayout(0, NUMPY_DTYPES[block.dtype])
        steps = decode_steps(codec, block, file, nbytes)
        for step, start in zip(steps, base.chunks(), strict=True):
            yield delta.decode(unpacked(step), layout._replace(size=len(step)), start)
    else:
        layout = ArrayLayout(block.numel, NUMPY_DTYPES[block.dtype])
        # What is written as it is has no length before it.
        pieces = _pieces_of(made.line, layout, file, nbytes, framed=bool(made.line))
        needed = any(stage.reads_base for stage in made.line)
        starts = base.chunks() if needed else (np.empty(0) for _ in chunk_counts(block.numel))
        for (layouts, piece), start in zip(pieces, starts, strict=True):
            yield _decode_chunk(made.line, layouts, piece, start)


def decode_steps(codec: str, block: Block, file: BinaryIO, nbytes: int) -> Iterator[Array | Steps]:
    """As `decode`, for a codec of differences: yields these as they were sent, without the version's own values."""
    made = parse(codec)
    line = made.line[1:]
    if made.lowrank:
        pieces = _pieces_of(line, ArrayLayout(made.lowrank.size(block.shape), F32), file, nbytes)
        factors = np.concatenate([unpacked(_steps(line, *piece)) for piece in pieces])
        yield from made.lowrank.decode(factors, block.shape)
    else:
        for piece in _pieces_of(line, ArrayLayout(block.numel, F32), file, nbytes):
            yield _steps(line, *piece)


def _steps(line: tuple[Stage, ...], layouts: list[ArrayLayout], piece: Array) -> Array | Steps:
    if not line:
        return _decode_chunk(line, layouts, piece, piece)
    values = _decode_chunk(line[1:], layouts[1:], piece, piece)
    return line[0].packed(values, layouts[0])


def _pieces_of(
    line: tuple[Stage, ...], layout: ArrayLayout, file: BinaryIO, nbytes: int, *, framed: bool = True
) -> Iterator[tuple[list[ArrayLayout], Array]]:
    """Yield the encoded bytes of each chunk, with what its stages make of it."""
    left, width = nbytes, layout.dtype.itemsize
    for count in chunk_counts(layout.size):
        length = count * width
        layouts = _layouts(line, layout._replace(size=count))
        if framed:
            (length,) = struct.unpack("<I", _exactly(file, 4, left))
            left -= 4
            # Bounded by the chunk, not by the block: what is read is held at once.
            if left >= length > _longest_chunk(line, layouts[0]):
                raise CodecError("chunk-too-long", f"a chunk of {count} elements claims {length} bytes")
        piece = np.frombuffer(_exactly(file, length, left), dtype=np.uint8)
        left -= length
        yield layouts, piece
    if left:
        raise CodecError("bytes-left-over", f"{left} bytes are left over behind the last chunk")


def _layouts(line: tuple[Stage, ...], layout: ArrayLayout) -> list[ArrayLayout]:
    """Return what each stage is handed when encoding, which is what it must give back when decoding.

    Raises CodecError if a stage cannot take what the one before it gives.
    """
    layouts = [layout]
    for stage in line:
        if layouts[-1].size < 0:
            # Its decoding would have no bound: what a frame unpacks to is known only from the layout.
            raise CodecError("codec-order", f"stage {stage.name} cannot follow one whose size depends on the data")
        layouts.append(stage.layout(layouts[-1]))
    return layouts


def _decode_chunk(line: tuple[Stage, ...], layouts: list[ArrayLayout], piece: Array, base: Array) -> Array:
    last = layouts[-1]
    if last.size >= 0 and piece.nbytes != last.nbytes:
        raise CodecError("chunk-size", f"a chunk has {piece.nbytes} bytes, not {last.nbytes}")
    values = piece.view(last.dtype)
    for stage, layout in zip(reversed(line), reversed(layouts[:-1]), strict=True):
        values = stage.decode(values, layout, base)
        if (values.size, values.dtype) != layout:
            raise CodecError("stage-size", f"stage {stage.name} gave {values.size} x {values.dtype}, not {layout}")
    return values


def _exactly(file: BinaryIO, count: int, left: int) -> bytes | memoryview:
    if count > left:
        raise CodecError("chunk-beyond-block", f"a chunk claims {count} bytes where {left} are left")
    data = taken(file, count)
    if len(data) != count:
        raise CodecError("bytes-missing", f"the bytes end {count - len(data)} short")
    return data
