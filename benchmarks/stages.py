"""Where the processor time of a round goes: `python -m benchmarks.stages [--megabytes 100 --workers 4]`.

Each stage of a round is done alone, by the code that a round does it with, on float32 weights that moved as in
`benchmarks.rounds`, lossless. CPU seconds of this process, the least of some tries; reading is from the page cache.
The rest of a round's cost is requests, and waiting for locks and for the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from benchmarks.measuring import OUT, Results
from benchmarks.methods.drift import drawn, moved
from benchmarks.payloads import Weights
from tessera.shared.aggregation.mean import average
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import Plan
from tessera.shared.model.blocks import Block
from tessera.shared.rounds.blob_store import Batch, StoredBlob
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.lazy import ArrayTensor, as_bytes, digest_of, lockstep, related
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update, write_update

TRIES = 3
PIECE_BYTES = 1 << 18


class InMemory:
    """Blobs to be read, without disk and database."""

    def __init__(self, *blobs: bytes) -> None:
        self._blobs = {digest_of(blob): blob for blob in blobs}

    def size(self, digest: str) -> int:
        return len(self._blobs[digest])

    def reading_ahead(self, digests: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def expect(self, digests: Collection[str]) -> None:
        """They are here."""

    def open(self, digest: str) -> BinaryIO:
        return io.BytesIO(self._blobs[digest])

    def read(self, digest: str) -> bytes:
        return self._blobs[digest]

    def put(self, pieces: Iterable[bytes | memoryview]) -> StoredBlob:
        raise NotImplementedError("these are read only")

    def batch(self) -> AbstractContextManager[Batch]:
        raise NotImplementedError("these are read only")


@dataclass(frozen=True)
class Round:
    """One worker's model, change and update file, in memory."""

    weights: Weights
    blocks: dict[str, Block]
    bases: dict[str, ArrayTensor]
    changed: dict[str, ArrayTensor]
    update: bytes

    @classmethod
    def of(cls, nbytes: int) -> Round:
        weights = Weights.of(nbytes, layers=16)
        blocks = weights.model.by_name
        bases, changed = {}, {}
        for block, raw in weights.blocks():
            base = np.frombuffer(raw, np.float32)
            bases[block.name] = ArrayTensor(base)
            changed[block.name] = ArrayTensor(moved(base.copy(), drawn(1)))
        file = io.BytesIO()
        write_update(file, LOSSLESS, [TrainedBlock(blocks[name], changed[name], bases[name]) for name in blocks])
        return cls(weights, blocks, bases, changed, file.getvalue())

    @property
    def nbytes(self) -> int:
        return self.weights.model.nbytes

    def read(self) -> dict[str, EncodedTensor]:
        return read_update(lambda: io.BytesIO(self.update), len(self.update), self.blocks, self.bases)

    def encode(self) -> None:
        changes = [TrainedBlock(self.blocks[name], self.changed[name], self.bases[name]) for name in self.blocks]
        write_update(io.BytesIO(), LOSSLESS, changes)

    def decode(self) -> None:
        for tensor in self.read().values():
            for _ in tensor.chunks():
                pass

    def inspector(self) -> tuple[Inspector, Manifest]:
        starts = {name: bytes(as_bytes(base.values)) for name, base in self.bases.items()}
        store = InMemory(self.update, *starts.values())
        manifest = Manifest(blocks={name: digest_of(start) for name, start in starts.items()})
        return Inspector(store, States(store)), manifest

    def inspect(self, inspector: Inspector, manifest: Manifest) -> None:
        """Reads the update, decodes it and looks at every value."""
        inspector.checked(digest_of(self.update), self.weights.model, manifest, Plan(), None)

    def merge(self, workers: int) -> None:
        senders = [(8.0, self.changed)] * workers
        new = average(self.bases, senders, "participants")
        for group in related(list(new.values())):
            for _ in lockstep(group):
                pass

    def hash(self, nbytes: int) -> None:
        received = hashlib.sha256()
        piece = bytes(PIECE_BYTES)
        for _ in range(nbytes // PIECE_BYTES):
            received.update(piece)


def processor(work: Callable[[], None]) -> float:
    found = []
    for _ in range(TRIES):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def write(folder: Path, nbytes: int) -> None:
    piece = bytes(PIECE_BYTES)
    with (folder / "written").open("wb") as file:
        for _ in range(nbytes // PIECE_BYTES):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> None:
    with (folder / "written").open("rb") as file:
        while file.read(PIECE_BYTES):
            pass


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a small model: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    one, count = Round.of(int((1.0 if given.quick else given.megabytes) * 1e6)), given.workers
    whole, sent = one.nbytes, len(one.update)
    about = f"CPU seconds of one round, {count} workers of {whole / 1e6:.0f} MB, updates of {sent / 1e6:.0f} MB"
    results = Results("stages", about)
    with tempfile.TemporaryDirectory(prefix="tessera-stages-") as name:
        folder = Path(name)
        writing = processor(lambda: write(folder, whole)) / whole
        reading = processor(lambda: read(folder)) / whole
        hashing = processor(lambda: one.hash(whole)) / whole
        digesting = len(one.update) * hashing
        encoding, decoding = map(processor, (one.encode, one.decode))
        inspector = one.inspector()
        inspecting = processor(lambda: one.inspect(*inspector)) - decoding - digesting
        merging = processor(lambda: one.merge(count))
    for where, what, seconds in (
        ("coordinator", "hash what is uploaded", count * sent * hashing),
        ("coordinator", "write and flush it", count * sent * writing),
        ("coordinator", "inspect: read update and version", count * (sent + whole) * reading),
        ("coordinator", "inspect: decode", count * decoding),
        ("coordinator", "inspect: finite, norm", count * inspecting),
        ("coordinator", "merge: read updates and versions", count * (sent + whole) * reading),
        ("coordinator", "merge: decode", count * decoding),
        ("coordinator", "merge: sum", merging),
        ("coordinator", "hash the new version", whole * hashing),
        ("coordinator", "write and flush it", whole * writing),
        ("workers", "hash what is downloaded", count * whole * hashing),
        ("workers", "write it to the cache", count * whole * writing),
        ("workers", "encode", count * encoding),
        ("workers", "hash the update", count * sent * hashing),
    ):
        results.add(where=where, stage=what, cpu_s=seconds)
    results.finish(given.out)


if __name__ == "__main__":
    main()
