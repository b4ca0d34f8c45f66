"""How much memory each of the largest hostile updates takes to refuse, as JSON: `python -m tests.support.hostile`."""

from __future__ import annotations

import json
import multiprocessing
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zstandard

from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import Plan
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.problems import InvalidUpdate
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.lazy import CHUNK
from tessera.shared.updates.update_file import MAX_HEADER_BYTES
from tessera.simulation.blob_folder import Folder
from tests.support.malformed import wide_window
from tests.support.updates import container, update_file

MIB = 1 << 20
WIDE = 8 * CHUNK
"""Elements of the largest block."""
SMALL = 3000


def model() -> Model:
    wide = Block(tensor="wide", role="embedding", shape=(2048, WIDE // 2048), dtype="F32")
    small = [Block(tensor=f"small.{i}", role="mlp", shape=(1,), dtype="F32") for i in range(SMALL)]
    return Model(config={"model_type": "bert"}, head="features", blocks=(wide, *small))


def filled(begin: bytes, piece: bytes, end: bytes) -> bytes:
    """A header as long as may be."""
    room = MAX_HEADER_BYTES - len(begin) - len(end) - 16
    return container(begin + piece * (room // len(piece)) + end, b"")


def bomb(size: int, *, states_its_size: bool = True) -> bytes:
    """Zeros in a frame of the widest window that is accepted."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=23, compression_level=1, write_content_size=states_its_size
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(size))


def chunks(codec: str, piece: bytes, count: int = WIDE // CHUNK) -> bytes:
    return update_file({"wide": (struct.pack("<I", len(piece)) + piece) * count}, codec=codec)


def hostile() -> Iterator[tuple[str, bytes]]:
    yield "lists", filled(b'{"a": [', b"[],", b"[]]}")
    yield "objects", filled(b'{"a": [', b"{},", b"{}]}")
    yield "nested", filled(b"", b"[", b"")
    yield "metrics", filled(b'{"a": [', b"1.5,", b"1]}")
    yield "a long string", filled('{"a": "😀'.encode(), b"x", b'"}')
    yield "many strings", filled(b'{"a": [', b'"ab",', b'""]}')
    names = b"".join(b'"%06d":1,' % i for i in range(MAX_HEADER_BYTES // 12))
    yield "many names", container(b"{" + names + b'"a":1}', b"")
    yield "many unknown tensors", update_file({f"unknown.{i}": b"" for i in range(40_000)})
    yield "all blocks and some more", update_file({**{f"small.{i}": b"" for i in range(SMALL)}, "x": b""})
    yield "nothing but spaces", update_file({}, padding=64 * MIB)
    yield "a bomb in each chunk", chunks("zstd", bomb(32 * MIB))
    yield "a bomb of differences", chunks("delta+zstd", bomb(256 * MIB))
    yield "a window of 1 GiB", chunks("zstd", wide_window())
    yield "a frame of the widest window", chunks("zstd", bomb(16 * MIB, states_its_size=False))
    yield "factors of zeros", chunks("delta+lowrank=128+zstd", bomb(4 * CHUNK), 2)


def refused(folder: Folder, made: Model, manifest: Manifest, digest: str) -> float:
    """The MiB by which this process grows to refuse the update."""
    inspector = Inspector(folder, States(folder))
    held = _memory_mib("VmRSS")
    try:
        inspector.checked(digest, made, manifest, Plan(), None)
    except InvalidUpdate:
        return _memory_mib("VmHWM") - held
    raise AssertionError("a hostile update was accepted")


def _memory_mib(line: str) -> float:
    """What the kernel says that this process holds (VmRSS), or held at most (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[line].split()[0]) / 1024


def stored(folder: Folder) -> dict[str, str]:
    return {what: folder.put([data]).digest for what, data in hostile()}


def main() -> None:
    # Each in a process that nothing was made in before: memory that was freed and kept would hide what is taken.
    fresh = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name, fresh.Pool(1, maxtasksperchild=1) as pool:
        folder, made = Folder(Path(name)), model()
        wide, small = folder.put([bytes(4 * WIDE)]).digest, folder.put([bytes(4)]).digest
        manifest = Manifest(blocks={block.name: wide if block.name == "wide" else small for block in made.blocks})
        grown = {
            what: pool.apply(refused, (folder, made, manifest, digest))
            for what, digest in pool.apply(stored, (folder,)).items()
        }
    print(json.dumps(grown))


if __name__ == "__main__":
    main()
