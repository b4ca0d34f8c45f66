"""An update on the wire: a safetensors file with a byte string per block, and each block's codec in its metadata."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import BinaryIO, ClassVar, cast

import numpy as np

from tessera.shared.model.blocks import Block
from tessera.shared.problems import Fault, InvalidUpdate
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.hashing import Hashing
from tessera.shared.tensors.lazy import CHUNK, PIECE, Array, ArrayTensor, Steps, Tensor, chunk_counts, squares
from tessera.shared.tensors.mmap_file import taken
from tessera.shared.tensors.statistics import is_statistic
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.codecs.delta import difference
from tessera.shared.updates.codecs.stage import CodecError
from tessera.shared.updates.errors import Kind
from tessera.shared.updates.safetensors_file import ContainerError, Header, TensorEntry, read_header, write_streams

FORMAT = "tessera-update/1"
WHOLE = "/update"
"""The pointer to the whole update."""
_CODEC = "codec:"
_WEIGHT = "weight:"
_COUNT = re.compile(r"[1-9][0-9]{0,11}", re.ASCII)
HEADER_BYTES_PER_BLOCK = 2_048
MAX_HEADER_BYTES = 4 << 20
"""The limit of a header from a worker, for about ten thousand blocks: bounds the memory for a malicious one."""
MAX_BEGUN_BYTES = 32 << 20
"""The limit of encoded blocks that are held until they are written."""
SMALL = PIECE
"""Number of elements up to which blocks are encoded and decoded together."""
SPARE_TENSORS = 64
"""Number of unrequested tensors that are still named in the error; a header with more is not parsed."""


@dataclass(frozen=True)
class TrainedBlock:
    """A block as the worker leaves it, with the version's value that it started from."""

    block: Block
    value: Tensor
    base: Tensor
    rest: Array | None = None
    """The differences that earlier updates dropped, float32 and flat, to be added to this one."""
    weight: int | None = None
    """The number of examples behind the block, if it is not that of the update."""

    def values(self) -> Iterator[Array]:
        """Yield the new value with the rest, in the block's own type, chunk by chunk."""
        for value, rest in zip(self.value.chunks(), self._rests(), strict=True):
            yield value if rest is None else (value + rest).astype(value.dtype)

    def steps(self) -> Iterator[Array]:
        """Yield the difference from the version with the rest, as float32, chunk by chunk."""
        for value, base, rest in self.parts():
            step = difference(value, base)
            yield step if rest is None else step + rest

    def parts(self) -> Iterator[tuple[Array, Array, Array | None]]:
        """Yield the new value, the version's and the rest, chunk by chunk."""
        return zip(self.value.chunks(), self.base.chunks(), self._rests(), strict=True)

    def sample(self, place: int, most: int = CHUNK) -> TrainedBlock:
        """Return at most `most` elements at the start of one chunk, as a change of their own."""
        values, base = (next(islice(chunks, place, None))[:most] for chunks in (self.values(), self.base.chunks()))
        block = Block(tensor="sample", role="other", shape=values.shape, dtype=self.block.dtype)
        return TrainedBlock(block, ArrayTensor(values, block.dtype), ArrayTensor(base, block.dtype))

    def _rests(self) -> Iterator[Array | None]:
        counts = chunk_counts(self.block.numel)
        return (None if self.rest is None else self.rest[CHUNK * n :][:count] for n, count in enumerate(counts))


def codec_for(codec: str, change: TrainedBlock) -> str:
    """Return the stages of `codec` that are worthwhile for this block."""
    return pipeline.worthwhile(_suited(codec, change.block), change)


def _suited(codec: str, block: Block) -> str:
    # An extra array may be counts, and has no error feedback.
    exact = is_statistic(block.name) or block.role == "extra"
    lossy = exact and not pipeline.parse(codec).lossless
    return pipeline.LOSSLESS if lossy else pipeline.suited(codec, block)


@dataclass(frozen=True)
class WrittenUpdate:
    """An update as it was written to a file."""

    nbytes: Mapping[str, int]
    """The encoded size of each block."""
    norms: Mapping[str, float]
    """The l2 norm of each block's difference from its version, before coding; empty unless requested."""
    digest: str | None
    """The file's digest; None if the file was not written from its start to its end."""


def write_update(
    file: BinaryIO,
    chosen: str | Mapping[str, str],
    changes: Sequence[TrainedBlock],
    seed: int = 0,
    *,
    norms: bool = False,
) -> WrittenUpdate:
    """Write an update, with a codec for each block, or one for all as far as it is worthwhile for them. `file` must
    be seekable. With stochastic rounding, the same seed gives the same bytes.

    The differences' norms, if requested, are computed while the codecs read the blocks.
    """
    by_name = {change.block.name: change for change in changes}
    measured = {name: _Measured(change) for name, change in by_name.items()} if norms else {}
    begun: dict[str, Array] = {}
    if isinstance(chosen, str):
        chosen, begun = _worthwhile(chosen, changes, measured)
    rng = np.random.Generator(np.random.SFC64(seed))
    raw = all(codec == pipeline.RAW for codec in chosen.values())
    # Encoded sizes, and so the header at the file's start, are known only in the end.
    sizes = {name: change.block.nbytes for name, change in by_name.items()} if raw else None
    hashing = Hashing(file)
    nbytes = write_streams(
        hashing if raw else file,
        (
            (name, pipeline.encode(chosen[name], measured.get(name, change), rng, begun.pop(name, None)))
            for name, change in by_name.items()
        ),
        _metadata(chosen, {name: change.weight for name, change in by_name.items() if change.weight is not None}),
        chosen,
        sizes,
    )
    found = {name: math.sqrt(each.squares) for name, each in measured.items()}
    return WrittenUpdate(nbytes, found, hashing.digest if raw else None)


def write_encoded(
    file: BinaryIO, blocks: Iterable[tuple[str, Iterator[bytes | memoryview]]], codecs: Mapping[str, str]
) -> None:
    """Write an update from encoded blocks, in the order of `codecs`. `file` must be seekable."""
    write_streams(file, blocks, _metadata(codecs), codecs)


def _metadata(codecs: Mapping[str, str], weights: Mapping[str, int] = MappingProxyType({})) -> dict[str, str]:
    of_codecs = {_CODEC + name: codec for name, codec in codecs.items()}
    return {"format": FORMAT, **of_codecs, **{_WEIGHT + name: str(weight) for name, weight in weights.items()}}


class _Measured:
    """A block's change, and the sum of its squared differences from the version, taken while a codec reads it.

    A block that was encoded whole to choose its codec is measured then, and is not read again.
    """

    def __init__(self, change: TrainedBlock) -> None:
        self.squares = 0.0
        self._change = change
        self._start: Array | None = None

    @property
    def base(self) -> Tensor:
        """The version's value, chunk by chunk beside `values`, which have read it already."""
        return cast("Tensor", self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._change.base.shape

    def chunks(self) -> Iterator[Array]:
        for _ in chunk_counts(self._change.block.numel):
            start, self._start = self._start, None
            yield cast("Array", start)

    def values(self) -> Iterator[Array]:
        for value, _, rest in self._measured():
            yield value if rest is None else (value + rest).astype(value.dtype)

    def steps(self) -> Iterator[Array]:
        return (step for _, step, _ in self._measured())

    def _measured(self) -> Iterator[tuple[Array, Array, Array | None]]:
        # Some codecs read a block several times.
        self.squares = 0.0
        for value, start, rest in self._change.parts():
            step = difference(value, start) if rest is None else difference(value, start) + rest
            self.squares += squares(step)
            self._start = start
            yield value, step, rest
        self._start = None


def longest_update(blocks: Iterable[Block]) -> int:
    """Return about the most bytes of an update of these blocks, with its header."""
    return sum(block.nbytes + block.nbytes // 16 + HEADER_BYTES_PER_BLOCK for block in blocks)


def _worthwhile(
    codec: str, changes: Sequence[TrainedBlock], measured: Mapping[str, _Measured]
) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the codec of each block, and the blocks that were encoded to find it out, as far as they may be held in
    memory."""
    chosen: dict[str, str] = {}
    begun: dict[str, Array] = {}
    room = MAX_BEGUN_BYTES
    for (own, _, _), group in _alike(codec, changes).items():
        inputs = [measured.get(change.block.name, change) for change in group]
        for change, (kept, first) in zip(group, pipeline.trials(own, inputs), strict=True):
            chosen[change.block.name] = kept
            if first is not None and first.nbytes <= room:
                room -= first.nbytes
                begun[change.block.name] = first
    return {change.block.name: chosen[change.block.name] for change in changes}, begun


def _alike(codec: str, changes: Sequence[TrainedBlock]) -> dict[tuple[str, DType, str], list[TrainedBlock]]:
    """Return the small changes of one codec and type together, and each large one alone."""
    groups: dict[tuple[str, DType, str], list[TrainedBlock]] = {}
    for change in changes:
        block = change.block
        alone = "" if block.numel <= SMALL else block.name
        groups.setdefault((_suited(codec, block), block.dtype, alone), []).append(change)
    return groups


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A block inside an update file, decoded chunk by chunk each time it is read."""

    block: Block
    codec: str
    base: Tensor
    open: Callable[[], BinaryIO]
    start: int
    nbytes: int
    weight: int | None = None
    """The number of examples behind the block; that of the update if None."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def dtype(self) -> DType:
        return self.block.dtype

    def chunks(self) -> Iterator[Array]:
        with self.open() as file:
            file.seek(self.start)
            yield from pipeline.decode(self.codec, self.block, self.base, file, self.nbytes)

    @property
    def sent_as_steps(self) -> bool:
        return pipeline.parse(self.codec).of_differences

    def steps(self) -> Iterator[Array | Steps]:
        """Yield the difference of each chunk from the version, as it was sent or as float32."""
        if self.sent_as_steps:
            with self.open() as file:
                file.seek(self.start)
                yield from pipeline.decode_steps(self.codec, self.block, file, self.nbytes)
        else:
            yield from map(difference, self.chunks(), self.base.chunks())


@dataclass(frozen=True, eq=False)
class DecodedTensor:
    """A block of an update, decoded and held in memory as one flat chunk."""

    block: Block
    base: Tensor
    values: Array
    start: Array
    """The values of `base`."""
    weight: int | None = None
    sent_as_steps: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def dtype(self) -> DType:
        return self.block.dtype

    def chunks(self) -> Iterator[Array]:
        yield self.values

    def steps(self) -> Iterator[Array]:
        """Yield the difference from the version, as float32."""
        yield difference(self.values, self.start)


UpdateTensor = EncodedTensor | DecodedTensor


def decoded(tensors: Mapping[str, EncodedTensor], start_of: Callable[[Tensor], Array]) -> dict[str, UpdateTensor]:
    """Return the blocks of an update, the small ones decoded, many in one array operation.

    Blocks that are better summed as they were sent stay as they are. `start_of` returns the values of a base. Raises
    Malformed without the block's name.
    """
    found: dict[str, UpdateTensor] = dict(tensors)
    groups: dict[tuple[str, DType], list[EncodedTensor]] = {}
    for tensor in tensors.values():
        if tensor.block.numel <= SMALL and not tensor.sent_as_steps:
            groups.setdefault((tensor.codec, tensor.dtype), []).append(tensor)
    for (codec, dtype), group in groups.items():
        # As they lie in the file.
        group.sort(key=lambda tensor: tensor.start)
        with group[0].open() as file:
            pieces = [_bytes_of(file, tensor) for tensor in group]
        starts = [start_of(tensor.base) for tensor in group]
        values = pipeline.decode_group(codec, dtype, [start.size for start in starts], pieces, starts)
        for tensor, start, own in zip(group, starts, values, strict=True):
            found[tensor.block.name] = DecodedTensor(tensor.block, tensor.base, own, start, tensor.weight)
    return found


def _bytes_of(file: BinaryIO, tensor: EncodedTensor) -> bytes | memoryview:
    file.seek(tensor.start)
    return taken(file, tensor.nbytes)


def read_update(
    open_file: Callable[[], BinaryIO], nbytes: int, asked: Mapping[str, Block], bases: Mapping[str, Tensor]
) -> dict[str, EncodedTensor]:
    """Return the update's blocks, lazily decoded. `asked` are the blocks that the plan uploads.

    Raises InvalidUpdate naming all errors of form: an unreadable header, unrequested blocks, unknown codecs, more
    bytes than a block can need. The values are checked as they are read.
    """
    header = _header(open_file, nbytes, asked)
    faults = [_not_asked(name, asked) for name in sorted(set(header.entries) - set(asked))]
    # One string for all blocks and updates.
    chosen = {name: sys.intern(header.metadata.get(_CODEC + name, "")) for name in header.entries}
    weights = {name: header.metadata.get(_WEIGHT + name) for name in header.entries}
    faults += [
        Fault(pointer=name, detail=fault[1][:300], code=fault[0])
        for name in sorted(set(header.entries) & set(asked))
        if (fault := _form_fault(asked[name], chosen[name], header.entries[name], weights[name]))
    ]
    if faults:
        raise InvalidUpdate(f"the update has {len(faults)} malformed or unwanted blocks", errors=faults)
    return {
        name: EncodedTensor(
            asked[name],
            chosen[name],
            bases[name],
            open_file,
            header.data_start + entry.start,
            entry.nbytes,
            int(weight) if (weight := weights[name]) is not None else None,
        )
        for name, entry in sorted(header.entries.items())
    }


def _header(open_file: Callable[[], BinaryIO], nbytes: int, asked: Mapping[str, Block]) -> Header:
    try:
        with open_file() as file:
            limit = min(HEADER_BYTES_PER_BLOCK * (1 + len(asked)), MAX_HEADER_BYTES)
            header = read_header(file, nbytes, limit, len(asked) + SPARE_TENSORS)
    except ContainerError as fault:
        raise of_whole(fault.code, f"the update is not a well-formed safetensors file: {fault}") from None
    if header.metadata.get("format") != FORMAT:
        actual = header.metadata.get("format", "none")
        raise of_whole("unknown-format", f"the update's format is {actual[:64]!r}; this coordinator reads {FORMAT!r}")
    return header


def of_whole(code: Kind, detail: str, remedy: str | None = None) -> InvalidUpdate:
    """Return the error for a fault of the whole update."""
    detail = detail[:1000]
    return InvalidUpdate(detail, errors=[Fault(pointer=WHOLE, detail=detail[:300], code=code)], remedy=remedy)


def _not_asked(name: str, asked: Mapping[str, Block]) -> Fault:
    of_asked = {block.tensor for block in asked.values()}
    if name in of_asked or name.partition("#")[0] in of_asked:
        detail = "this slice was not asked for; another of its tensor was"
        return Fault(pointer=name[:300], detail=detail, code="slice-not-asked")
    return Fault(pointer=name[:300], detail="this block was not asked for", code="block-not-asked")


def _form_fault(block: Block, codec: str, entry: TensorEntry, weight: str | None) -> tuple[Kind, str] | None:
    if entry.dtype != "U8" or len(entry.shape) != 1:
        return "not-bytes", f"an encoded block is a U8 vector, not {entry.dtype} {list(entry.shape)}"
    if not codec:
        return "codec-missing", "the metadata name no codec for this block"
    if weight is not None and not _COUNT.fullmatch(weight):
        return "weight-invalid", f"{weight[:32]!r} is not a number of examples, from 1 to 10^12 - 1"
    try:
        line = pipeline.parse(codec).line
        suited = pipeline.suited(codec, block)
        limit = pipeline.longest(codec, block)
    except CodecError as fault:
        return fault.code, str(fault)
    if suited != codec:
        return (
            "codec-unsuited",
            f"{codec[:64]} does not suit a block of shape {list(block.shape)}: send it as {suited[:64]}",
        )
    if not line and entry.nbytes != block.nbytes:
        kind: Kind = "block-too-short" if entry.nbytes < block.nbytes else "block-too-long"
        size = f"{block.nbytes} bytes ({block.dtype} {list(block.shape)})"
        return kind, f"{entry.nbytes} bytes were sent for a block of {size}"
    if entry.nbytes > limit:
        return "block-too-long", f"{entry.nbytes} encoded bytes are more than a block of {block.nbytes} needs"
    return None
