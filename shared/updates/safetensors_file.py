"""The safetensors container: a strict reader of its header, and a writer that streams.

The usual readers accept duplicate names, overlapping or absent spans and headers of any size; this one takes bytes
from peers that may be hostile, so it checks all of that before anything is allocated from what the header says.
Format: 8 bytes little-endian header length, the header as JSON padded with spaces, then the data.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, BinaryIO, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tessera.shared.problems import message_of
from tessera.shared.schema import Frozen
from tessera.shared.updates.errors import HeaderKind, Malformed

MAX_HEADER_BYTES = 16 << 20
PARTS_PER_TENSOR = 16
"""Braces, brackets and commas that a tensor may have in a header: more than twice of what it needs."""
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


class ContainerError(Malformed):
    """The bytes are not a well-formed safetensors file."""


_Offset = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]


class TensorEntry(Frozen):
    """One tensor: where its bytes lie, counted from the end of the header."""

    dtype: str
    shape: tuple[Annotated[int, Field(strict=True, ge=0, lt=1 << 48)], ...] = Field(max_length=8)
    data_offsets: tuple[_Offset, _Offset]

    @property
    def start(self) -> int:
        return self.data_offsets[0]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


T = TypeVar("T")

_ENTRY = TypeAdapter(TensorEntry)
_METADATA = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class Header:
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    """Where the data begins in the file, in bytes."""


def read_header(
    file: BinaryIO, file_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES, max_tensors: int | None = None
) -> Header:
    """Read and check the header of a file of `file_bytes` bytes. The data must be covered without gap or overlap.

    What it holds meanwhile is a few times the header if `max_tensors` is given, and much more if it is not.
    Raises ContainerError saying what is wrong.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ContainerError("header-missing", "shorter than the 8 bytes of a header length")
    (length,) = struct.unpack("<Q", prefix)
    if length > max_header_bytes:
        raise ContainerError(
            "header-too-long", f"the header claims {length} bytes; at most {max_header_bytes} are read"
        )
    if 8 + length > file_bytes:
        raise ContainerError("header-beyond-file", f"the header claims {length} bytes of a file of {file_bytes}")
    raw = file.read(length)
    if len(raw) < length:
        raise ContainerError("file-changed", f"the file ends {length - len(raw)} bytes before its header does")
    if max_tensors is not None and sum(map(raw.count, (b"{", b"[", b","))) > PARTS_PER_TENSOR * (max_tensors + 4):
        # Before it is parsed: three bytes become an object of seventy.
        raise ContainerError("too-many-tensors", f"the header has more parts than {max_tensors} tensors need")
    table = _parse(raw)
    if max_tensors is not None and len(table) - ("__metadata__" in table) > max_tensors:
        raise ContainerError(
            "too-many-tensors", f"the header names {len(table)} tensors; at most {max_tensors} may be"
        )
    for name in table:
        # Above all no lone surrogates, which cannot be written into any answer.
        if not name.isprintable():
            raise ContainerError("bad-name", f"{name[:200]!r} is no name of a tensor")
    metadata = _checked(_METADATA, "__metadata__", table.pop("__metadata__", {}))
    entries = {name: _checked(_ENTRY, name, value) for name, value in table.items()}
    _check_spans(entries, file_bytes - 8 - length)
    return Header(entries, metadata, 8 + length)


def _parse(raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ContainerError("duplicate-name", "the header names a tensor or field twice")
        return table

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant)
    except ContainerError:
        raise
    except UnicodeDecodeError:
        raise ContainerError("header-not-utf8", "the header is not JSON: it is not UTF-8") from None
    except RecursionError:
        raise ContainerError(
            "header-too-deep", "the header is not JSON that can be read: it is nested too deep"
        ) from None
    except ValueError as fault:
        raise ContainerError("header-not-json", f"the header is not JSON: {fault}") from None
    if not isinstance(table, dict):
        raise ContainerError("header-not-object", "the header is not a JSON object")
    return table


def _no_constant(text: str) -> object:
    raise ContainerError("header-constant", f"the header holds {text}")


def _checked(kind: TypeAdapter[T], name: str, value: object) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ContainerError(_kind_of(name, first), f"{name[:200]!r}: {where} {message_of(first)}") from None


def _kind_of(name: str, fault: ErrorDetails) -> HeaderKind:
    of_types: dict[str, HeaderKind] = {
        "missing": "entry-missing-field",
        "extra_forbidden": "entry-unknown-field",
        "too_long": "too-many-axes",
    }
    of_fields: dict[object, HeaderKind] = {
        "shape": "bad-shape",
        "data_offsets": "bad-offsets",
        "dtype": "bad-dtype",
    }
    if name == "__metadata__":
        return "bad-metadata"
    if not fault["loc"]:
        return "bad-entry"
    of_field = of_fields.get(fault["loc"][0], "bad-entry")
    whole = len(fault["loc"]) == 1 and not (fault["type"] == "too_long" and of_field != "bad-shape")
    return of_types.get(fault["type"], of_field) if whole else of_field


def _check_spans(entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        width = DTYPE_BYTES.get(entry.dtype)
        if width is None:
            raise ContainerError(
                "unknown-dtype", f"{name[:200]!r} has dtype {entry.dtype[:32]!r}, which is not known"
            )
        if kind := _misplaced(entry, end, data_bytes):
            raise ContainerError(kind, f"{name[:200]!r} spans {entry.data_offsets}: {_MISPLACED[kind]}")
        if entry.nbytes != prod(entry.shape) * width:
            raise ContainerError(
                "shape-misfit",
                f"{name[:200]!r} spans {entry.data_offsets}, which misfits its shape {list(entry.shape)}",
            )
        end += entry.nbytes
    if end != data_bytes:
        raise ContainerError(
            "bytes-behind-data", f"the header describes {end} bytes of data; the file has {data_bytes}"
        )


_MISPLACED: dict[HeaderKind, str] = {
    "offsets-reversed": "it ends before it begins",
    "offsets-beyond-file": "the file ends before that",
    "offsets-overlap": "another tensor's bytes are there",
    "offsets-gap": "the bytes before that belong to none",
}


def _misplaced(entry: TensorEntry, end: int, data_bytes: int) -> HeaderKind | None:
    """Return what is wrong with a span behind one that ended at `end`, if anything is."""
    if entry.nbytes < 0:
        return "offsets-reversed"
    if entry.data_offsets[1] > data_bytes:
        return "offsets-beyond-file"
    if entry.start != end:
        return "offsets-overlap" if entry.start < end else "offsets-gap"
    return None


Layout = Iterable[tuple[str, str, tuple[int, ...]]]
"""Tensors in the order of their data, as (name, dtype, shape)."""


def header_bytes(layout: Layout, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the beginning of a file, up to where the data begins."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in layout:
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return _packed(header)


def write(
    file: BinaryIO, layout: Layout, data: Iterable[bytes | memoryview], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors whose sizes are known; `data` has their bytes in the layout's order."""
    tensors = list(layout)
    file.write(header_bytes(tensors, metadata))
    written = sum(file.write(piece) for piece in data)
    expected = sum(prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors)
    if written != expected:
        raise ContainerError("shape-misfit", f"{written} bytes were given for tensors of {expected}")


def write_streams(
    file: BinaryIO,
    streams: Iterable[tuple[str, Iterator[bytes | memoryview]]],
    metadata: Mapping[str, str],
    names: Iterable[str],
) -> None:
    """Write byte strings (dtype U8) whose lengths are known only once they are written.

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
