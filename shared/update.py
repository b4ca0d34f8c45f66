"""An update on the wire: a safetensors file with a byte string per block, and each block's codec in its metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from shared import codecs
from shared.blocks import Block, DType
from shared.container import ContainerError, Header, read_header, write_streams
from shared.problems import Fault, InvalidUpdate
from shared.tensors import Array, Tensor

FORMAT = "tessera-update/1"
_CODEC = "codec:"
HEADER_BYTES_PER_BLOCK = 2_048


@dataclass(frozen=True)
class Change:
    """A block as the worker leaves it, beside the version's value that it started from."""

    block: Block
    value: Tensor
    base: Tensor


def write_update(file: BinaryIO, codec: str, changes: Sequence[Change]) -> None:
    """Writes an update, choosing `raw` for each block on which `codec` would not pay. `file` must be seekable."""
    chosen = {c.block.name: codecs.worthwhile(codec, c.value, c.base) for c in changes}
    write_streams(
        file,
        ((c.block.name, codecs.encode(chosen[c.block.name], c.value, c.base)) for c in changes),
        {"format": FORMAT, **{_CODEC + name: name_of for name, name_of in chosen.items()}},
        chosen,
    )


@dataclass(frozen=True)
class EncodedTensor:
    """A block inside an update file: decoded chunk by chunk, anew each time it is read."""

    block: Block
    codec: str
    base: Tensor
    open: Callable[[], BinaryIO]
    start: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def dtype(self) -> DType:
        return self.block.dtype

    def chunks(self) -> Iterator[Array]:
        with self.open() as file:
            file.seek(self.start)
            yield from codecs.decode(self.codec, self.block, self.base, file, self.nbytes)


def read_update(
    open_file: Callable[[], BinaryIO], nbytes: int, asked: Mapping[str, Block], bases: Mapping[str, Tensor]
) -> dict[str, EncodedTensor]:
    """The update's blocks, lazily decoded. `asked` are the blocks that the plan lets it carry.

    Raises InvalidUpdate naming everything that is wrong with its form: an unreadable header, blocks that were not
    asked for, unknown codecs, more bytes than a block can need. The values themselves are checked as they are read.
    """
    header = _header(open_file, nbytes, asked)
    faults = [
        Fault(pointer=name[:300], detail="this block was not asked for")
        for name in sorted(set(header.entries) - set(asked))
    ]
    chosen = {name: header.metadata.get(_CODEC + name, "") for name in header.entries}
    for name in sorted(set(header.entries) & set(asked)):
        faults += _form_faults(name, asked[name], chosen[name], header)
    if faults:
        raise InvalidUpdate(f"the update has {len(faults)} malformed or unwanted blocks", errors=faults)
    return {
        name: EncodedTensor(
            asked[name], chosen[name], bases[name], open_file, header.data_start + entry.start, entry.nbytes
        )
        for name, entry in sorted(header.entries.items())
    }


def _header(open_file: Callable[[], BinaryIO], nbytes: int, asked: Mapping[str, Block]) -> Header:
    try:
        with open_file() as file:
            header = read_header(file, nbytes, HEADER_BYTES_PER_BLOCK * (1 + len(asked)))
    except ContainerError as fault:
        raise InvalidUpdate(f"the update is not a well-formed safetensors file: {fault}") from None
    if header.metadata.get("format") != FORMAT:
        found = header.metadata.get("format", "none")
        raise InvalidUpdate(f"the update's format is {found[:64]!r}; this coordinator reads {FORMAT!r}")
    return header


def _form_faults(name: str, block: Block, codec: str, header: Header) -> list[Fault]:
    entry = header.entries[name]
    if entry.dtype != "U8" or len(entry.shape) != 1:
        return [Fault(pointer=name, detail=f"an encoded block is a U8 vector, not {entry.dtype} {list(entry.shape)}")]
    try:
        stages = codecs.stages(codec)
    except codecs.CodecError as fault:
        return [Fault(pointer=name, detail=str(fault)[:300])]
    if not stages and entry.nbytes != block.nbytes:
        want = f"{block.nbytes} bytes ({block.dtype} {list(block.shape)})"
        return [Fault(pointer=name, detail=f"{entry.nbytes} bytes were sent for a block of {want}")]
    if entry.nbytes > codecs.longest(block.nbytes):
        return [
            Fault(
                pointer=name,
                detail=f"{entry.nbytes} encoded bytes are more than a block of {block.nbytes} needs",
            )
        ]
    return []
