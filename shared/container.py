"""The safetensors container: a strict reader of its header, and a writer that streams.

The usual readers accept duplicate names, overlapping or absent spans and headers of any size; this one takes bytes
from peers that may be hostile, so it checks all of that before anything is allocated from what the header says.
Format: 8 bytes little-endian header length, the header as JSON padded with spaces, then the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, BinaryIO, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from shared.blocks import Frozen

MAX_HEADER_BYTES = 16 << 20
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


class ContainerError(ValueError):
    """The bytes are not a well-formed safetensors file."""


class Entry(Frozen):
    """One tensor: where its bytes lie, counted from the end of the header."""

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0, lt=1 << 48)], ...] = Field(max_length=8)
    data_offsets: tuple[int, int]

    @property
    def start(self) -> int:
        return self.data_offsets[0]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


T = TypeVar("T")

_ENTRY = TypeAdapter(Entry)
_METADATA = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class Header:
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int
    """Where the data begins in the file, in bytes."""


def read_header(file: BinaryIO, file_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Reads and checks the header of a file of `file_bytes` bytes. The data must be covered without gap or overlap.

    Raises ContainerError saying what is wrong.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ContainerError("shorter than the 8 bytes of a header length")
    (length,) = struct.unpack("<Q", prefix)
    if length > max_header_bytes:
        raise ContainerError(f"the header claims {length} bytes; at most {max_header_bytes} are read")
    if 8 + length > file_bytes:
        raise ContainerError(f"the header claims {length} bytes of a file of {file_bytes}")
    table = _parse(file.read(length))
    for name in table:
        # Above all no lone surrogates, which cannot be written into any answer.
        if not name.isprintable():
            raise ContainerError(f"{name[:200]!r} is no name of a tensor")
    metadata = _checked(_METADATA, "__metadata__", table.pop("__metadata__", {}))
    entries = {name: _checked(_ENTRY, name, value) for name, value in table.items()}
    _check_spans(entries, file_bytes - 8 - length)
    return Header(entries, metadata, 8 + length)


def _parse(raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ContainerError("the header names a tensor or field twice")
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant)
    except ContainerError:
        raise
    except (ValueError, RecursionError) as fault:
        raise ContainerError(f"the header is not JSON: {fault}") from None
    if not isinstance(table, dict):
        raise ContainerError("the header is not a JSON object")
    return table


def _no_constant(text: str) -> object:
    raise ContainerError(f"the header holds {text}")


def _checked(kind: TypeAdapter[T], name: str, value: object) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        raise ContainerError(f"{name[:200]!r}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None


def _check_spans(entries: Mapping[str, Entry], data_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        width = DTYPE_BYTES.get(entry.dtype)
        if width is None:
            raise ContainerError(f"{name[:200]!r} has dtype {entry.dtype!r}, which is not known")
        if entry.start != end or entry.nbytes != prod(entry.shape) * width:
            raise ContainerError(
                f"{name[:200]!r} spans {entry.data_offsets}, which leaves a gap or misfits its shape"
            )
        end += entry.nbytes
    if end != data_bytes:
        raise ContainerError(f"the header describes {end} bytes of data; the file has {data_bytes}")


Layout = Iterable[tuple[str, str, tuple[int, ...]]]
"""Tensors in the order of their data, as (name, dtype, shape)."""


def header_bytes(layout: Layout, metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a file, up to where the data begins."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in layout:
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return _packed(header)


def write(
    file: BinaryIO, layout: Layout, data: Iterable[bytes | memoryview], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors whose sizes are known; `data` has their bytes in the layout's order."""
    tensors = list(layout)
    file.write(header_bytes(tensors, metadata))
    written = sum(file.write(piece) for piece in data)
    expected = sum(prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors)
    if written != expected:
        raise ContainerError(f"{written} bytes were given for tensors of {expected}")


def write_streams(
    file: BinaryIO,
    streams: Iterable[tuple[str, Iterator[bytes | memoryview]]],
    metadata: Mapping[str, str],
    names: Iterable[str],
) -> None:
    """Writes byte strings (dtype U8) whose lengths are known only once they are written.

    Room for the header is left first, as wide as the longest offsets could make it, and filled in at the end;
    the format lets a header be padded with spaces. `file` must be seekable.
    """
    widest = 10**15
    longest = {name: _bytes_entry(widest, widest) for name in names}
    room = len(_packed({"__metadata__": dict(metadata), **longest})) - 8
    file.seek(8 + room)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, pieces in streams:
        start, end = end, end + sum(file.write(piece) for piece in pieces)
        header[name] = _bytes_entry(start, end)
    file.seek(0)
    file.write(_packed(header, room))


def _bytes_entry(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start or 0], "data_offsets": [start, end]}


def _packed(header: Mapping[str, object], room: int = 0) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    # Data begins on an 8-byte boundary, as readers that map the file expect.
    length = max(room, len(text) + -len(text) % 8)
    return struct.pack("<Q", length) + text.ljust(length)
