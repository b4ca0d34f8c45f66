"""Update files as no worker of ours would write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from tessera.shared.updates.safetensors_file import DTYPE_BYTES
from tessera.shared.updates.update_file import FORMAT


def update_file(
    blocks: Mapping[str, bytes],
    *,
    codec: str | None = "raw",
    format_: str | None = FORMAT,
    dtype: str = "U8",
    shape: tuple[int, ...] | None = None,
    padding: int = 0,
) -> bytes:
    """A well-formed safetensors file of these bytes, with whatever is said about them."""
    header: dict[str, object] = {}
    metadata = {"format": format_} if format_ is not None else {}
    end = 0
    for name, data in blocks.items():
        start, end = end, end + len(data)
        said = shape if shape is not None else (len(data) // DTYPE_BYTES[dtype],)
        header[name] = {"dtype": dtype, "shape": said, "data_offsets": [start, end]}
        if codec is not None:
            metadata[f"codec:{name}"] = codec
    return container({"__metadata__": metadata, **header}, b"".join(blocks.values()), padding)


def container(header: object, data: bytes = bytes(4), padding: int = 0) -> bytes:
    """Any header before any data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * padding
    return struct.pack("<Q", len(text)) + text + data
