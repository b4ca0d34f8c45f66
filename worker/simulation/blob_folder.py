"""A folder of blobs under their sha-256, whole or not there: where a simulation keeps versions and updates.

Files survive the death of a process, not that of the machine: nothing waits for the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from tessera.shared.problems import NotFound
from tessera.shared.rounds.blob_store import Stored
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.state.atomic_files import TEMPORARY, sweep
from tessera.worker.state.blob_cache import DIGEST

PIECE_BYTES = 1 << 20


class Folder:
    """A `BlobStore` in a folder. Starting it removes what a killed process left half-written."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        sweep(path)
        self._path = path

    def path(self, digest: str) -> Path:
        """Return where a blob lies. Raises NotFound."""
        path = self._place(digest)
        if not path.is_file():
            raise NotFound(f"there is no blob {digest}")
        return path

    def size(self, digest: str) -> int:
        return self.path(digest).stat().st_size

    def expect(self, digests: Collection[str]) -> None:
        """Files need not be looked up."""

    def open(self, digest: str) -> BinaryIO:
        return self.path(digest).open("rb")

    def read(self, digest: str) -> bytes:
        return self.path(digest).read_bytes()

    def put(self, pieces: Iterable[bytes | memoryview]) -> Stored:
        with self.writer() as writer:
            for piece in pieces:
                writer.write(piece)
            return writer.finish()

    def batch(self) -> AbstractContextManager[Folder]:
        return nullcontext(self)

    @contextmanager
    def writer(self) -> Iterator[FolderWriter]:
        temporary = self._path / (uuid4().hex + TEMPORARY)
        try:
            with temporary.open("xb") as file:
                yield FolderWriter(self, file, temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def adopt(self, temporary: Path, digest: str) -> None:
        """Give a finished file of this folder the name of its content."""
        final = self._place(digest)
        final.parent.mkdir(exist_ok=True)
        temporary.replace(final)

    def keep_only(self, wanted: set[str]) -> None:
        """Remove every other blob."""
        for file in self._path.glob("??/*"):
            if f"sha256:{file.name}" not in wanted:
                file.unlink()

    def remove(self, unwanted: Iterable[str]) -> None:
        """Remove these blobs, as far as they are here."""
        for digest in unwanted:
            self._place(digest).unlink(missing_ok=True)

    # ------------------------------------------------------------ as `upload_model` writes

    def has_blob(self, digest: str) -> bool:
        return self._place(digest).is_file()

    def put_bytes(self, data: bytes) -> str:
        return digest_of(data) if self.has_blob(digest_of(data)) else self.put([data]).digest

    def _place(self, digest: str) -> Path:
        match = DIGEST.fullmatch(digest)
        if match is None:
            raise NotFound(f"not a digest: {digest[:80]!r}")
        return self._path / match[1][:2] / match[1]


class FolderWriter:
    """Bytes on their way into the folder, hashed as they pass."""

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

    def finish(self) -> Stored:
        self._file.flush()
        digest = f"sha256:{self._received.hexdigest()}"
        self._folder.adopt(self._path, digest)
        return Stored(digest, self._size)
