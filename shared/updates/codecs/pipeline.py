"""The encoding of a block for the wire by a chain of named stages, such as `bits+shuffle+zstd` or `delta+int8+zstd`.

A block is encoded chunk by chunk (`tensors.CHUNK` elements), each after its length in four bytes, so that both ends
stream. `raw` is the block's own bytes.
"""

import importlib
import pkgutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, starmap
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from tessera.shared.model.blocks import Block
from tessera.shared.near_names import did_you_mean
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import (
    CHUNK,
    Array,
    ArrayTensor,
    Steps,
    Tensor,
    as_bytes,
    chunk_counts,
    numel,
    unpacked,
)
from tessera.shared.tensors.mmap_file import taken
from tessera.shared.updates.codecs.lowrank import LowRank
from tessera.shared.updates.codecs.stage import F32, ArrayLayout, CodecError, Stage

RAW = "raw"
LOSSLESS = "bits+shuffle+zstd"
"""Exact, and the smallest of the measured codecs: bit-pattern difference, byte planes, zstd."""

WORTH = 0.95
"""Lossless stages are used for a block only if they reduce a probe of it below this share of its size."""

PROBE = CHUNK // 4
"""Elements at the start of a block that are encoded as a probe. Smaller byte planes would share a Huffman code, and
seem larger by a twentieth."""

STAGES: dict[str, type[Stage | LowRank]] = {
    stage.name: stage
    for info in pkgutil.iter_modules([str(Path(__file__).parent)])
    if info.name != Path(__file__).stem
    for stage in getattr(importlib.import_module(f"{__package__}.{info.name}"), "STAGES", ())
}


@dataclass(frozen=True)
class Codec:
    """A parsed codec."""

    line: tuple[Stage, ...]
    """The stages that work chunk by chunk."""
    lowrank: LowRank | None = None

    @property
    def lossless(self) -> bool:
        return all(stage.lossless for stage in self.line)

    @property
    def drops(self) -> bool:
        """True if a worker drops part of its differences, and keeps it for the next round."""
        return self.lowrank is not None or any(stage.drops for stage in self.line)

    @property
    def of_differences(self) -> bool:
        """True if the codec sends steps from the version, as float32, rather than the bits of new values."""
        return bool(self.line) and self.line[0].name == "delta"


_NO_DICE = np.random.default_rng(0)
"""For lossless stages, which draw nothing."""


@lru_cache
def parse(codec: str) -> Codec:
    """Return the stages of a codec. Raises CodecError naming the unknown stages and the known ones, or the reason why
    they do not form a chain."""
    parts = [part.partition("=") for part in ([] if codec == RAW else codec.split("+"))]
    names = [name for name, _, _ in parts]
    if unknown := [name for name in names if name not in STAGES]:
        # Raw blocks have no stages: it stands alone.
        near = did_you_mean(unknown[0].partition(":")[0], STAGES if RAW in names else [RAW, *STAGES])
        raise CodecError("codec-unknown", f"codec {codec!r} has unknown stages {unknown}{near}")
    if len(set(names)) < len(names):
        # A worker chooses the codec of its blocks: a chain of a thousand stages would cost a thousand passes.
        raise CodecError("codec-repeated", f"codec {codec[:64]!r} names a stage twice")
    stages = [STAGES[name].of(parameter if equals else None) for name, equals, parameter in parts]
    line = tuple(stage for stage in stages if isinstance(stage, Stage))
    lowrank = next((stage for stage in stages if isinstance(stage, LowRank)), None)
    if later := [stage.name for stage in line[1:] if stage.reads_base]:
        raise CodecError("codec-order", f"stage {later[0]} comes first")
    if names[:1] != ["delta"] and (rounding := [stage.name for stage in stages if not stage.lossless]):
        # Half a percent of a weight is more than it changes in a round.
        raise CodecError(
            "codec-order", f"stage {rounding[0]} rounds, and only differences may be rounded: put delta first"
        )
    if lowrank and names.index("lowrank") != 1:
        raise CodecError("codec-order", "stage lowrank comes second, directly after delta")
    _layouts(line, ArrayLayout(1, NUMPY_DTYPES["F32"]))
    return Codec(line, lowrank)


def suited(codec: str, block: Block) -> str:
    """Return the codec without `lowrank` if that is not worthwhile for a block of this shape."""
    lowrank = parse(codec).lowrank
    if lowrank is None or lowrank.pays(block.shape):
        return codec
    return "+".join(part for part in codec.split("+") if not part.startswith("lowrank"))


# ---------------------------------------------------------------- encoding


class CodecInput(Protocol):
    """A block's new value and the version's, and their difference as float32, chunk by chunk."""

    @property
    def base(self) -> Tensor: ...
    def values(self) -> Iterator[Array]: ...
    def steps(self) -> Iterator[Array]: ...


def encode(
    codec: str, change: CodecInput, rng: np.random.Generator | None = None, whole: Array | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the encoded bytes of a block, piece by piece. `rng` is for stages with stochastic rounding; `whole` is
    the encoded block, if `trial` has it."""
    parsed = parse(codec)
    if not parsed.line:
        yield from map(as_bytes, change.values())
        return
    pieces = _pieces(parsed, change, rng or np.random.default_rng()) if whole is None else [whole]
    for piece in pieces:
        data = as_bytes(piece)
        yield struct.pack("<I", len(data))
        yield data


def _pieces(parsed: Codec, change: CodecInput, rng: np.random.Generator) -> Iterator[Array]:
    if parsed.lowrank:
        factors = ArrayTensor(parsed.lowrank.encode(change.steps, change.base.shape, rng))
        return (_encode_chunk(parsed.line[1:], part, part, rng) for part in factors.chunks())
    if parsed.of_differences:
        return (_encode_chunk(parsed.line[1:], step, step, rng) for step in change.steps())
    both = zip(change.values(), change.base.chunks(), strict=True)
    return (_encode_chunk(parsed.line, chunk, base, rng) for chunk, base in both)


def _encode_chunk(line: tuple[Stage, ...], chunk: Array, base: Array, rng: np.random.Generator) -> Array:
    for stage in line:
        chunk = stage.encode(chunk, base, rng)
    return chunk


def worthwhile(codec: str, change: CodecInput) -> str:
    """Return the codec without its last lossless stages unless they reduce the block's first elements enough; `raw`
    if it has no other stages."""
    return trial(codec, change)[0]


def trial(codec: str, change: CodecInput) -> tuple[str, Array | None]:
    """Return `worthwhile`, and the encoded block if the codec is lossless and the probe was all of the block."""
    parsed = parse(codec)
    rounding = max((place + 1 for place, stage in enumerate(parsed.line) if not stage.lossless), default=0)
    if parsed.lowrank or rounding == len(parsed.line):
        return codec, None
    rng = np.random.default_rng(0) if rounding else _NO_DICE
    without = "+".join(codec.split("+")[:rounding]) or RAW
    values = next(change.steps() if parsed.of_differences else change.values(), None)
    if values is None:
        return without, None
    whole = numel(change.base) <= PROBE
    values, base = values[:PROBE], next(change.base.chunks())[:PROBE]
    # Only differences are rounded, and `steps` has them already.
    line, place = (parsed.line[1:], rounding - 1) if parsed.of_differences else (parsed.line, 0)
    plain = _encode_chunk(line[:place], values, base, rng)
    full = _encode_chunk(line[place:], plain, base, rng)
    if full.nbytes + 4 >= WORTH * plain.nbytes:
        return without, None
    return codec, full if whole and not rounding else None


def trials(codec: str, changes: Sequence[CodecInput]) -> list[tuple[str, Array | None]]:
    """Return `trial` of each small change, of one type. The first stage encodes them as one, if it can."""
    parsed = parse(codec)
    if not (parsed.lossless and parsed.line and parsed.line[0].elementwise and len(changes) > 1):
        return [trial(codec, change) for change in changes]
    values = [next(change.values()) for change in changes]
    bases = [next(change.base.chunks()) for change in changes]
    first, *rest = parsed.line
    found: list[tuple[str, Array | None]] = []
    flat, at = first.encode(np.concatenate(values), np.concatenate(bases), _NO_DICE), 0
    for plain, base in zip(values, bases, strict=True):
        encoded = _encode_chunk(tuple(rest), flat[at : at + plain.size], base, _NO_DICE)
        at += plain.size
        found.append((codec, encoded) if encoded.nbytes + 4 < WORTH * plain.nbytes else (RAW, None))
    return found


def longest(codec: str, block: Block) -> int:
    """Return the largest size of an encoded block in bytes: incompressible data grows a little."""
    return _longest(codec, block.shape, NUMPY_DTYPES[block.dtype])


@lru_cache(maxsize=4096)
def _longest(codec: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
    parsed = parse(codec)
    line, layout = parsed.line, ArrayLayout(prod(shape), dtype)
    if not line:
        return layout.nbytes
    if parsed.lowrank:
        line, layout = line[1:], ArrayLayout(parsed.lowrank.size(shape), F32)
    return sum(4 + _longest_chunk(line, layout._replace(size=count)) for count in chunk_counts(layout.size))


def _longest_chunk(line: tuple[Stage, ...], layout: ArrayLayout) -> int:
    fixed = [each for each in _layouts(line, layout) if each.size >= 0][-1].nbytes
    return fixed + fixed // 64 + 1_024


# ---------------------------------------------------------------- decoding


def decode(codec: str, block: Block, base: Tensor, file: BinaryIO, nbytes: int) -> Iterator[Array]:
    """Yield the chunks of `block` from `nbytes` encoded bytes at the file's position.

    Reads and allocates no more than the block's shape allows, regardless of the sizes in the data. Raises CodecError
    if the bytes are not exactly one block.
    """
    parsed = parse(codec)
    if parsed.of_differences:
        delta, layout = parsed.line[0], ArrayLayout(0, NUMPY_DTYPES[block.dtype])

        def moved(step: Array | Steps, start: Array) -> Array:
            return delta.decode(unpacked(step), layout._replace(size=len(step)), start)

        # By `map`, which holds no chunk while it waits to be asked for the next: of a thousand senders that are read
        # side by side, each would hold one.
        yield from map(moved, decode_steps(codec, block, file, nbytes), base.chunks())
    else:
        layout = ArrayLayout(block.numel, NUMPY_DTYPES[block.dtype])
        # Only encoded chunks have a length before them.
        pieces = _pieces_of(parsed.line, layout, file, nbytes, framed=bool(parsed.line))
        needed = any(stage.reads_base for stage in parsed.line)
        starts = base.chunks() if needed else (np.empty(0) for _ in chunk_counts(block.numel))

        def decoded(piece: tuple[list[ArrayLayout], Array], start: Array) -> Array:
            return _decode_chunk(parsed.line, *piece, start)

        yield from map(decoded, pieces, starts)


def decode_group(
    codec: str, dtype: DType, counts: Sequence[int], pieces: Sequence[bytes | memoryview], starts: Sequence[Array]
) -> list[Array]:
    """Return small blocks of one type, of `counts` elements each, from their encoded bytes and the version's values.
    The codec is not one of differences. Raises CodecError if any of them is malformed: `decode` names it."""
    parsed, kind = parse(codec), NUMPY_DTYPES[dtype]
    whole = not (parsed.line and parsed.line[0].elementwise)
    line = parsed.line if whole else parsed.line[1:]
    found = []
    for count, piece, start in zip(counts, pieces, starts, strict=True):
        layouts = _layouts(parsed.line, ArrayLayout(count, kind))
        framed = 4 if parsed.line else 0
        if len(piece) <= framed or (framed and struct.unpack_from("<I", piece)[0] != len(piece) - framed):
            raise CodecError("bytes-left-over", "the bytes are not exactly one chunk")
        encoded = np.frombuffer(piece, np.uint8, offset=framed)
        found.append(_decode_chunk(line, layouts[len(parsed.line) - len(line) :], encoded, start))
    if whole:
        return found
    layout = ArrayLayout(sum(counts), kind)
    flat = parsed.line[0].decode(np.concatenate(found), layout, np.concatenate(starts))
    ends = list(accumulate(counts))
    return [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]


def decode_steps(codec: str, block: Block, file: BinaryIO, nbytes: int) -> Iterator[Array | Steps]:
    """Yield the chunks of a block of differences as they were sent, without the version's values; see `decode`."""
    parsed = parse(codec)
    line = parsed.line[1:]
    if parsed.lowrank:
        pieces = _pieces_of(line, ArrayLayout(parsed.lowrank.size(block.shape), F32), file, nbytes)
        factors = np.concatenate([unpacked(_steps(line, *piece)) for piece in pieces])
        yield from parsed.lowrank.decode(factors, block.shape)
    else:
        yield from starmap(partial(_steps, line), _pieces_of(line, ArrayLayout(block.numel, F32), file, nbytes))


def _steps(line: tuple[Stage, ...], layouts: list[ArrayLayout], piece: Array) -> Array | Steps:
    if not line:
        return _decode_chunk(line, layouts, piece, piece)
    values = _decode_chunk(line[1:], layouts[1:], piece, piece)
    return line[0].packed(values, layouts[0])


def _pieces_of(
    line: tuple[Stage, ...], layout: ArrayLayout, file: BinaryIO, nbytes: int, *, framed: bool = True
) -> Iterator[tuple[list[ArrayLayout], Array]]:
    """Yield the encoded bytes of each chunk, with the layouts between its stages."""
    left, width = nbytes, layout.dtype.itemsize
    for count in chunk_counts(layout.size):
        length = count * width
        layouts = _layouts(line, layout._replace(size=count))
        if framed:
            (length,) = struct.unpack("<I", _exactly(file, 4, left))
            left -= 4
            # Bounded by the chunk, not by the block, since the bytes are held in memory.
            if left >= length > _longest_chunk(line, layouts[0]):
                raise CodecError("chunk-too-long", f"a chunk of {count} elements claims {length} bytes")
        before, left = left, left - length
        yield layouts, np.frombuffer(_exactly(file, length, before), dtype=np.uint8)
    if left:
        raise CodecError("bytes-left-over", f"{left} bytes are left over behind the last chunk")


@lru_cache(maxsize=4096)
def _layouts(line: tuple[Stage, ...], layout: ArrayLayout) -> list[ArrayLayout]:
    """Return the layouts before each stage when encoding, which are those of its results when decoding, and the last.

    Raises CodecError if a stage cannot follow the stage before.
    """
    layouts = [layout]
    for stage in line:
        if layouts[-1].size < 0:
            # Its decoding would have no bound: the size of a frame's content is known only from the layout.
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
