"""A folder of blobs by SHA-256, in which a simulation stores versions and updates.

Files appear complete or not at all. They survive the death of a process, but no power cut: nothing is synced. Small
blobs that were written or read lately are in memory too.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from tessera.shared.problems import NotFound
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.state.atomic_files import sweep, temporary_file
from tessera.worker.state.blob_cache import DIGEST

PIECE_BYTES = 1 << 20
SMALL_BYTES = 1 << 16
"""The largest size of a blob that stays in memory."""
MEMORY_BYTES = 64 << 20
"""The limit of small blobs in memory, of which the newest stay."""


@lru_cache(maxsize=1 << 12)
def _place(folder: Path, digest: str) -> Path:
    match = DIGEST.fullmatch(digest)
    if match is None:
        raise NotFound(f"not a digest: {digest[:80]!r}")
    return folder / match[1][:2] / match[1]


class Folder:
    """A `BlobStore` in a folder. The constructor removes incomplete files that a killed process left."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        sweep(path)
        self._path = path
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0

    def path(self, digest: str) -> Path:
        """Return the path of a blob. Raises NotFound."""
        path = self.place(digest)
        if not path.is_file():
            raise NotFound(f"there is no blob {digest}")
        return path

    def place(self, digest: str) -> Path:
        """Return the path of a blob that may be absent. Raises NotFound."""
        return _place(self._path, digest)

    def small(self, digest: str) -> bytes | None:
        """Return a blob if it is small, and None for a large one. Raises NotFound."""
        data = self._memory.get(digest)
        if data is None:
            path = self.path(digest)
            if path.stat().st_size > SMALL_BYTES:
                return None
            data = path.read_bytes()
            self._remember(digest, data)
        return data

    def size(self, digest: str) -> int:
        data = self.small(digest)
        return self.path(digest).stat().st_size if data is None else len(data)

    def reading_ahead(self, digests: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def expect(self, digests: Collection[str]) -> None:
        """Do nothing: files need no look-up in advance."""

    def open(self, digest: str) -> BinaryIO:
        data = self.small(digest)
        return self.path(digest).open("rb") if data is None else BytesIO(data)

    def read(self, digest: str) -> bytes:
        data = self.small(digest)
        return self.path(digest).read_bytes() if data is None else data

    def put(self, pieces: Iterable[bytes | memoryview]) -> StoredBlob:
        with self.writer() as writer:
            for piece in pieces:
                writer.write(piece)
            return writer.finish()

    def batch(self) -> AbstractContextManager[Folder]:
        return nullcontext(self)

    @contextmanager
    def writer(self) -> Iterator[FolderWriter]:
        with temporary_file(self._path) as (temporary, file):
            yield FolderWriter(self, file, temporary)

    def adopt(self, temporary: Path, digest: str) -> None:
        """Move a finished file of this folder to the path of its digest."""
        final = self.place(digest)
        final.parent.mkdir(exist_ok=True)
        temporary.replace(final)

    def keep_only(self, wanted: set[str]) -> None:
        """Remove every other blob."""
        present = {f"sha256:{file.name}" for file in self._path.glob("??/*")}
        self.remove(present - wanted)

    def remove(self, unwanted: Iterable[str]) -> None:
        """Remove those of these blobs that are present."""
        for digest in unwanted:
            self.place(digest).unlink(missing_ok=True)
            self._memory_bytes -= len(self._memory.pop(digest, b""))

    def _remember(self, digest: str, data: bytes) -> None:
        self._memory[digest] = data
        self._memory_bytes += len(data)
        while self._memory_bytes > MEMORY_BYTES:
            _, oldest = self._memory.popitem(last=False)
            self._memory_bytes -= len(oldest)

    # ------------------------------------------------------------ for the coordinator and `upload_model`

    def record(self, *about: object) -> None:
        """Do nothing: files need no rows."""

    def has_blob(self, digest: str) -> bool:
        return self.place(digest).is_file()

    def put_bytes(self, data: bytes) -> str:
        return digest_of(data) if self.has_blob(digest_of(data)) else self.put([data]).digest


class FolderWriter:
    """A writer of one blob into the folder, which computes its digest."""

    def __init__(self, folder: Folder, file: BinaryIO, path: Path) -> None:
        self._folder = folder
        self._file = file
        self._path = path
        self._size = 0
        self._received = hashlib.sha256()

    def write(self, piece: bytes | memoryview) -> None:
        self._file.write(piece)
        self._received.update(piece)
        self._size += len(piece)

    def finish(self) -> StoredBlob:
        self._file.flush()
        digest = f"sha256:{self._received.hexdigest()}"
        self._folder.adopt(self._path, digest)
        return StoredBlob(digest, self._size)
