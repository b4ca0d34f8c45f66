"""The safetensors container: a strict reader of its header, and a streaming writer.

The usual readers accept duplicate names, overlapping or missing spans and headers of any size. This one reads bytes
of possibly malicious peers, so it checks all of that before it allocates memory by the header. The format: 8 bytes
with the header's length, little-endian; the header as JSON, padded with spaces; the data.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, BinaryIO, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tessera.shared.schema import Value
from tessera.shared.tensors.hashing import Sink
from tessera.shared.updates.errors import HeaderKind, Malformed
from tessera.shared.validation_errors import message_of

MAX_HEADER_BYTES = 16 << 20
PARTS_PER_TENSOR = 16
"""The limit of braces, brackets and commas per tensor in a header: more than twice the number that it needs."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class ContainerError(Malformed):
    """Bytes that are not a well-formed safetensors file."""


_Offset = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]


class TensorEntry(Value):
    """A tensor with the position of its bytes, relative to the end of the header."""

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
_ENTRIES = TypeAdapter(dict[str, TensorEntry])
_METADATA = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class Header:
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    """The offset of the data in the file, in bytes."""


def read_header(
    file: BinaryIO, file_bytes: int, max_header_bytes: int = MAX_HEADER_BYTES, max_tensors: int | None = None
) -> Header:
    """Read and check the header of a file of `file_bytes` bytes. Spans must cover the data without gap or overlap.

    Needs memory for a few times the header if `max_tensors` is given, and much more otherwise. Raises ContainerError.
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
        # Before parsing: three bytes become an object of seventy.
        raise ContainerError("too-many-tensors", f"the header has more parts than {max_tensors} tensors need")
    table = _parse(raw)
    if max_tensors is not None and len(table) - ("__metadata__" in table) > max_tensors:
        raise ContainerError("too-many-tensors", f"the header names {len(table)} tensors; the limit is {max_tensors}")
    for name in table:
        # In particular no lone surrogates, which no response can contain.
        if not name.isprintable():
            raise ContainerError("bad-name", f"{name[:200]!r} is not a valid tensor name")
    metadata = _checked(_METADATA, "__metadata__", table.pop("__metadata__", {}))
    try:
        entries = _ENTRIES.validate_python(table)
    except ValidationError:
        # One by one, to name the first that is wrong.
        entries = {name: _checked(_ENTRY, name, value) for name, value in table.items()}
    _check_spans(entries, file_bytes - 8 - length)
    return Header(entries, metadata, 8 + length)


def _parse(raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ContainerError("duplicate-name", "the header names a tensor or field twice")
        return table

    def reject(constant: str) -> object:
        raise ContainerError("header-constant", f"the header holds {constant}")

    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=reject)
    except ContainerError:
        raise
    except UnicodeDecodeError:
        raise ContainerError("header-not-utf8", "the header is not JSON: it is not UTF-8") from None
    except RecursionError:
        raise ContainerError("header-too-deep", "the header is not JSON: it is nested too deep") from None
    except ValueError as fault:
        raise ContainerError("header-not-json", f"the header is not JSON: {fault}") from None
    if not isinstance(table, dict):
        raise ContainerError("header-not-object", "the header is not a JSON object")
    return table


def _checked(kind: TypeAdapter[T], name: str, value: object) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        raise ContainerError(_kind_of(name, first), f"{name[:200]!r}: {where} {message_of(first)}") from None


def _kind_of(name: str, fault: ErrorDetails) -> HeaderKind:
    by_type: dict[str, HeaderKind] = {
        "missing": "entry-missing-field",
        "extra_forbidden": "entry-unknown-field",
        "too_long": "too-many-axes",
    }
    by_field: dict[object, HeaderKind] = {"shape": "bad-shape", "data_offsets": "bad-offsets", "dtype": "bad-dtype"}
    if name == "__metadata__":
        return "bad-metadata"
    field, *inner = fault["loc"] or ("",)
    kind = by_field.get(field, "bad-entry")
    if inner or (fault["type"] == "too_long" and kind != "bad-shape"):
        return kind
    return by_type.get(fault["type"], kind)


def _check_spans(entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        size = prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0)
        if start != end or stop - start != size or stop > data_bytes or entry.dtype not in DTYPE_BYTES:
            raise _span_error(name, entry, size, end, data_bytes)
        end = stop
    if end != data_bytes:
        raise ContainerError(
            "bytes-behind-data", f"the header describes {end} bytes of data; the file has {data_bytes}"
        )


def _span_error(name: str, entry: TensorEntry, size: int, end: int, data_bytes: int) -> ContainerError:
    """Return the error of a tensor's span, where the span before ends at `end`."""
    if entry.dtype not in DTYPE_BYTES:
        return ContainerError("unknown-dtype", f"{name[:200]!r} has the unknown dtype {entry.dtype[:32]!r}")
    faults: list[tuple[bool, HeaderKind, str]] = [
        (entry.nbytes < 0, "offsets-reversed", "it ends before it begins"),
        (entry.data_offsets[1] > data_bytes, "offsets-beyond-file", "the file ends before that"),
        (entry.start < end, "offsets-overlap", "another tensor's bytes are there"),
        (entry.start > end, "offsets-gap", "the bytes before that belong to no tensor"),
        (True, "shape-misfit", f"its shape {list(entry.shape)} needs {size} bytes"),
    ]
    kind, detail = next((kind, detail) for wrong, kind, detail in faults if wrong)
    return ContainerError(kind, f"{name[:200]!r} spans {entry.data_offsets}: {detail}")


Layout = Iterable[tuple[str, str, tuple[int, ...]]]
"""Tensors in the order of their data, as (name, dtype, shape)."""


def header_bytes(layout: Layout, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the start of a file, up to the data."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in layout:
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return _packed(header)


def write(
    file: BinaryIO, layout: Layout, data: Iterable[bytes | memoryview], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors of known sizes; `data` has their bytes in the layout's order."""
    tensors = list(layout)
    file.write(header_bytes(tensors, metadata))
    written = sum(file.write(piece) for piece in data)
    expected = sum(prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors)
    if written != expected:
        raise ContainerError("shape-misfit", f"{written} bytes were given for tensors of {expected}")


def write_streams(
    file: Sink,
    streams: Iterable[tuple[str, Iterator[bytes | memoryview]]],
    metadata: Mapping[str, str],
    names: Iterable[str],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Write byte strings (dtype U8), and return their lengths.

    If `sizes` gives the lengths, the file is written from its start to its end. Otherwise the header is written last,
    into reserved space, and `file` must be seekable. The space suffices for the longest offsets: the format allows
    padding with spaces. Raises ContainerError for a length other than that given.
    """
    room = _longest_header(tuple(names)) + len(_text(dict(metadata)))
    room += -room % 8
    if sizes is None:
        cast("BinaryIO", file).seek(8 + room)
    else:
        file.write(_packed(_bytes_header(metadata, sizes), room))
    written = {name: sum(file.write(piece) for piece in pieces) for name, pieces in streams}
    if sizes is None:
        cast("BinaryIO", file).seek(0)
        file.write(_packed(_bytes_header(metadata, written), room))
    elif written != sizes:
        name = next(name for name, size in sizes.items() if written.get(name) != size)
        raise ContainerError(
            "shape-misfit", f"{name}: {written.get(name)} bytes were given in place of {sizes[name]}"
        )
    return written


@lru_cache(maxsize=8)
def _longest_header(names: tuple[str, ...]) -> int:
    """Return the length of the longest header of byte strings, without its metadata."""
    widest = 10**15
    longest = {name: _bytes_entry(widest, widest) for name in names}
    return len(_text({"__metadata__": {}, **longest})) - len(_text({}))


def _bytes_header(metadata: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, size in sizes.items():
        start, end = end, end + size
        header[name] = _bytes_entry(start, end)
    return header


def _bytes_entry(start: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def _packed(header: Mapping[str, object], room: int = 0) -> bytes:
    text = _text(header)
    # Data begins on an 8-byte boundary, as readers that map the file require.
    length = max(room, len(text) + -len(text) % 8)
    return struct.pack("<Q", length) + text.ljust(length)


def _text(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
