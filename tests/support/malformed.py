"""Updates that may not be merged, each with the code of what is wrong with it.

They are for `small_model` under a plan that asks for its head and for the value slice of its fused matrix.
"""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import zstandard

from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.errors import Kind
from tests.support.federation import small_model, values
from tests.support.updates import container, update_file

NAME = "head.weight"
"""2 x 4 float32: 32 bytes."""
OTHER = "layer.0.qkv.weight#value"
"""4 x 4 float32: 64 bytes."""
ASKED = (NAME, OTHER)
HEAD = values(small_model())[NAME]

ENTRY = {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}
META = {"format": "tessera-update/1", f"codec:{NAME}": "raw"}


def one(entry: object, data: bytes = HEAD.tobytes(), metadata: object = None) -> bytes:
    """A file with this entry, whatever it is."""
    return container({"__metadata__": META if metadata is None else metadata, NAME: entry}, data)


def two(start: int, end: int, length: int) -> bytes:
    """A file of `length` bytes with a second tensor there."""
    second = {**ENTRY, "shape": [abs(end - start)], "data_offsets": [start, end]}
    return container({"__metadata__": META, NAME: ENTRY, OTHER: second}, bytes(length))


def frame(piece: bytes) -> bytes:
    return struct.pack("<I", len(piece)) + piece


def coded(codec: str, piece: bytes) -> bytes:
    """The head as this one chunk."""
    return update_file({NAME: frame(piece)}, codec=codec)


def weighed(weight: str) -> bytes:
    """The head with a number of examples of its own."""
    return one(ENTRY, metadata={**META, f"weight:{NAME}": weight})


def with_value(value: float) -> bytes:
    array = HEAD.copy()
    array[1, 2] = value
    return update_file({NAME: array.tobytes()})


def zstd(data: bytes, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def lying_frame() -> bytes:
    """A zstd frame that states 32 bytes of content and holds 1 MiB of zeros."""
    honest = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    # Magic (4), descriptor, window descriptor: rewritten as a single segment that claims 32 bytes.
    return honest[:4] + bytes([0x20, 32]) + honest[6:]


def wide_window() -> bytes:
    """A zstd frame that wants a window of 1 GiB to be set aside for it."""
    return struct.pack("<I", 0xFD2FB528) + bytes([0x00, (30 - 10) << 3]) + b"\x01\x00\x00"


def topk(*places: int) -> bytes:
    """Two of eight differences at these places, as topk=0.25 writes them."""
    return np.array(places, "<u2").tobytes() + np.ones(2, ml_dtypes.bfloat16).tobytes()


def int8(scale: float) -> bytes:
    return np.array([scale], "<f4").tobytes() + bytes([127] * 8)


JSON_ENTRY = json.dumps(ENTRY).encode()

CORPUS: dict[str, tuple[bytes, Kind]] = {
    "nothing at all": (b"", "header-missing"),
    "seven bytes": (bytes(7), "header-missing"),
    "a header longer than may be": (struct.pack("<Q", 1 << 62) + b"{}", "header-too-long"),
    "a header full of spaces": (update_file({NAME: HEAD.tobytes()}, padding=1 << 20), "header-too-long"),
    "a header longer than the file": (struct.pack("<Q", 100) + b"{}", "header-beyond-file"),
    "a header in Latin-1": (container(b'{"\xe9": 1}'), "header-not-utf8"),
    "a header that is no JSON": (container(b"{]"), "header-not-json"),
    "a header with two values": (container(b"{} {}"), "header-not-json"),
    "a number of five thousand digits": (container(b'{"a": ' + b"9" * 5000 + b"}"), "header-not-json"),
    "a header that is a list": (container(b"[]"), "header-not-object"),
    "a header nested a thousand deep": (container(b"[" * 1100), "header-too-deep"),
    "NaN for an entry": (container(b'{"a": NaN}'), "header-constant"),
    "infinity in a shape": (container(b'{"a": {"shape": [-Infinity]}}'), "header-constant"),
    "a tensor twice": (container(b'{"a": ' + JSON_ENTRY + b', "a": ' + JSON_ENTRY + b"}"), "duplicate-name"),
    "a field twice": (container(b'{"a": {"dtype": "U8", "dtype": "U8"}}'), "duplicate-name"),
    "more tensors than were asked for": (update_file({f"n{i}": b"" for i in range(70)}), "too-many-tensors"),
    "a header of brackets": (container(b"[" * 2000 + b"]" * 2000), "too-many-tensors"),
    "a name with a null": (update_file({f"{NAME}\0": bytes(32)}), "bad-name"),
    "a lone surrogate": (update_file({"\ud800": bytes(32)}), "bad-name"),
    "a name with a line break": (update_file({"head\nweight": bytes(32)}), "bad-name"),
    "metadata that are a list": (one(ENTRY, metadata=["format"]), "bad-metadata"),
    "metadata with numbers": (one(ENTRY, metadata={"format": 1}), "bad-metadata"),
    "an entry that is a number": (one(7), "bad-entry"),
    "an entry without offsets": (one({"dtype": "U8", "shape": [32]}), "entry-missing-field"),
    "an entry with one field more": (one({**ENTRY, "extra": 1}), "entry-unknown-field"),
    "a negative axis": (one({**ENTRY, "shape": [-32]}), "bad-shape"),
    "half an axis": (one({**ENTRY, "shape": [31.5]}), "bad-shape"),
    "an axis in quotes": (one({**ENTRY, "shape": ["32"]}), "bad-shape"),
    "an axis that is true": (one({**ENTRY, "shape": [True]}), "bad-shape"),
    "a huge axis": (one({**ENTRY, "shape": [1 << 60]}), "bad-shape"),
    "nine axes": (one({**ENTRY, "shape": [1] * 8 + [32]}), "too-many-axes"),
    "three offsets": (one({**ENTRY, "data_offsets": [0, 16, 32]}), "bad-offsets"),
    "a negative offset": (one({**ENTRY, "data_offsets": [-32, 0]}), "bad-offsets"),
    "an offset beyond 63 bits": (one({**ENTRY, "data_offsets": [0, 1 << 64]}), "bad-offsets"),
    "a dtype that is a number": (one({**ENTRY, "dtype": 8}), "bad-dtype"),
    "a dtype that there is not": (one({**ENTRY, "dtype": "U7"}), "unknown-dtype"),
    "a slice that ends before it begins": (two(48, 32, 48), "offsets-reversed"),
    "a slice beyond the file": (two(32, 96, 64), "offsets-beyond-file"),
    "a truncated file": (update_file({NAME: HEAD.tobytes()})[:-1], "offsets-beyond-file"),
    "overlapping slices": (two(16, 48, 48), "offsets-overlap"),
    "the same slice twice": (two(0, 32, 32), "offsets-overlap"),
    "a gap between slices": (two(33, 48, 48), "offsets-gap"),
    "a shape that misfits its span": (one({**ENTRY, "shape": [31]}), "shape-misfit"),
    "a type that misfits its span": (one({**ENTRY, "dtype": "F32"}), "shape-misfit"),
    "bytes behind the end": (update_file({NAME: HEAD.tobytes()}) + b"x", "bytes-behind-data"),
    "another format": (update_file({NAME: HEAD.tobytes()}, format_="pt"), "unknown-format"),
    "no format": (update_file({NAME: HEAD.tobytes()}, format_=None), "unknown-format"),
    "no block": (update_file({}), "no-block"),
    "a name there is not": (update_file({"head.bias": bytes(32)}), "block-not-asked"),
    "a name that is a path": (update_file({"../../head.weight": bytes(32)}), "block-not-asked"),
    "a frozen slice": (update_file({"layer.0.qkv.weight#key": bytes(64)}), "slice-not-asked"),
    "a slice out of range": (update_file({"layer.0.qkv.weight#12:16": bytes(64)}), "slice-not-asked"),
    "a whole tensor for its slice": (update_file({"layer.0.qkv.weight": bytes(192)}), "slice-not-asked"),
    "floats for bytes": (update_file({NAME: HEAD.tobytes()}, dtype="F32"), "not-bytes"),
    "bytes in two axes": (update_file({NAME: HEAD.tobytes()}, shape=(2, 16)), "not-bytes"),
    "no codec": (update_file({NAME: HEAD.tobytes()}, codec=None), "codec-missing"),
    "an unknown codec": (update_file({NAME: HEAD.tobytes()}, codec="gzip"), "codec-unknown"),
    "a codec that is code": (update_file({NAME: HEAD.tobytes()}, codec="__import__"), "codec-unknown"),
    "zstd in zstd": (coded("zstd+zstd", zstd(zstd(bytes(32)))), "codec-repeated"),
    "two hundred stages": (coded("+".join(["shuffle"] * 200), b"x"), "codec-repeated"),
    "planes behind zstd": (coded("zstd+shuffle", b"x"), "codec-order"),
    "a base behind planes": (coded("shuffle+bits", b"x"), "codec-order"),
    "rounded weights": (coded("int8", b"x"), "codec-order"),
    "a parameter for none": (coded("zstd=22", b"x"), "codec-parameter"),
    "a parameter that no database stores": (coded("zstd=\ud800", b"x"), "codec-parameter"),
    "a share above one": (coded("delta+topk=2", b"x"), "codec-parameter"),
    "a rank of a million": (coded("delta+lowrank=1000000", b"x"), "codec-parameter"),
    "rounding what is rounded": (coded("delta+int8+int4", b"x"), "codec-type"),
    "a rank of no use": (coded("delta+lowrank=2", b"x"), "codec-unsuited"),
    "a weight of zero": (weighed("0"), "weight-invalid"),
    "a weight that is no number": (weighed("ten"), "weight-invalid"),
    "a negative weight": (weighed("-5"), "weight-invalid"),
    "a weight that is NaN": (weighed("nan"), "weight-invalid"),
    "a weight of thirteen digits": (weighed("1" * 13), "weight-invalid"),
    "a weight that nothing asks for": (weighed("10"), "weight-unusable"),
    "a smaller shape": (update_file({NAME: HEAD[:1].tobytes()}), "block-too-short"),
    "another type": (update_file({NAME: HEAD.astype(np.float16).tobytes()}), "block-too-short"),
    "a larger shape": (update_file({NAME: bytes(48)}), "block-too-long"),
    "more encoded bytes than can be needed": (update_file({NAME: bytes(5000)}, codec=LOSSLESS), "block-too-long"),
    "a chunk that claims what is not there": (
        update_file({NAME: struct.pack("<I", 2**32 - 1)}, codec="zstd"),
        "chunk-beyond-block",
    ),
    "no length before a chunk": (update_file({NAME: b"ab"}, codec="zstd"), "chunk-beyond-block"),
    "a chunk longer than it can be": (coded("shuffle", bytes(1057)), "block-too-long"),
    "planes of another size": (coded("shuffle", bytes(31)), "chunk-size"),
    "a chunk too many": (update_file({NAME: frame(bytes(32)) + frame(b"")}, codec="shuffle"), "bytes-left-over"),
    "no zstd": (coded("zstd", b"not zstd at all"), "zstd-invalid"),
    "truncated zstd": (coded("zstd", zstd(HEAD.tobytes())[:-4]), "zstd-too-little"),
    "zstd and then something": (coded("zstd", zstd(HEAD.tobytes()) + b"hidden"), "zstd-invalid"),
    "a frame that lies of its size": (coded("zstd", lying_frame()), "zstd-invalid"),
    "a zstd window of 1 GiB": (coded("zstd", wide_window()), "zstd-window"),
    "a zstd bomb": (coded("zstd", zstd(bytes(1 << 20))), "zstd-too-much"),
    "two frames": (coded("zstd", zstd(HEAD.tobytes()) * 2), "zstd-too-much"),
    "a frame of too little": (coded("zstd", zstd(bytes(31))), "zstd-too-little"),
    "a place beyond the end": (coded("delta+topk=0.25", topk(0, 8)), "places-invalid"),
    "a place twice": (coded("delta+topk=0.25", topk(3, 3)), "places-invalid"),
    "NaN": (with_value(np.nan), "not-finite"),
    "the largest number": (with_value(np.finfo(np.float32).max), "too-far"),
    "infinity": (with_value(-np.inf), "not-finite"),
    "a scale of infinity": (coded("delta+int8", int8(np.inf)), "not-finite"),
    "a scale of NaN": (coded("delta+int8", int8(np.nan)), "not-finite"),
    "a difference that overflows": (coded("delta", np.full(8, 3e38, "<f4").tobytes() * 1), "too-far"),
    "larger than the run takes": (update_file({NAME: (HEAD + 1e3).astype("<f4").tobytes()}), "norm-limit"),
}
MAX_NORM = 100.0
"""What the run takes at most."""
