"""Bytes under their sha-256: small ones in the database, the others in an object store.

A blob is never visible in part. Its bytes are written under a temporary name, flushed to the disk, renamed to their
digest and only then entered in the `blobs` table; what the table does not know does not exist. The store is any that
`obstore` speaks to, a local folder by default.
"""

from __future__ import annotations

import hashlib
import io
import os
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import obstore
from anyio import to_thread
from obstore.store import LocalStore, from_url
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.database import Database
from coordinator.storage.tables import BlobRow
from shared.blobs import Stored
from shared.problems import NotFound, StoreSpoilt

PIECE_BYTES = 1 << 18

STREAM_BYTES = 1 << 20
"""What is read of a local file at a time to be sent: each piece is a trip to a thread."""


class StagingElsewhere(RuntimeError):
    """The staging folder is not on the blobs' file system."""


class Blobs:
    def __init__(
        self, database: Database, url: str, staging_dir: Path, inline_bytes: int, readahead_bytes: int
    ) -> None:
        self._database = database
        self._inline_bytes = inline_bytes
        self._readahead_bytes = readahead_bytes
        self.staging_dir = staging_dir
        staging_dir.mkdir(parents=True, exist_ok=True)
        # A disk may have spoilt what an earlier process wrote: each blob is hashed once more before its first use.
        self._sound: set[str] = set()
        self._root = None if "://" in url else Path(url)
        self._store = LocalStore(url, mkdir=True) if self._root else from_url(url)
        if self._root and self._root.stat().st_dev != staging_dir.stat().st_dev:
            raise StagingElsewhere(
                f"{staging_dir} and {url} are on two file systems; finishing an upload is a rename"
            )

    # ------------------------------------------------------------ writing

    def put(self, pieces: Iterable[bytes | memoryview]) -> Stored:
        """Makes bytes safe under their digest. To be entered with `record`."""
        with self.writer() as writer:
            for piece in pieces:
                writer.write(piece)
            return writer.finish()

    def writer(self) -> BlobWriter:
        """The same bit by bit. Several may be open at a time."""
        return BlobWriter(self, self._inline_bytes)

    def adopt(self, path: Path, digest: str, size: int) -> Stored:
        """Takes over a finished file of the staging folder, whose digest was checked."""
        if size <= self._inline_bytes:
            return Stored(digest, size, path.read_bytes())
        _flush(path)
        if self._root:
            final = self._root / _key(digest)
            final.parent.mkdir(parents=True, exist_ok=True)
            # The name is the content, so replacing a file of the same name changes nothing.
            path.replace(final)
            _flush(final.parent)
            _flush(self._root)
        else:
            obstore.put(self._store, _key(digest), path)
        self._sound.add(digest)
        return Stored(digest, size)

    def record(self, session: Session, now: float, stored: Sequence[Stored]) -> None:
        """Enters blobs in the table; those already there stay as they are."""
        new = {blob.digest: blob for blob in stored}
        known = session.scalars(select(BlobRow.digest).where(BlobRow.digest.in_(new)))
        for digest in known:
            del new[digest]
        session.add_all(
            BlobRow(digest=blob.digest, size=blob.size, inline=blob.inline, created_at=now) for blob in new.values()
        )
        session.flush()

    def save(self, pieces: Iterable[bytes | memoryview]) -> Stored:
        """`put` and `record` in one."""
        stored = self.put(pieces)
        with self._database.transaction() as session:
            self.record(session, self._database.now(), [stored])
        return stored

    def writable(self) -> bool:
        """Whether the staging folder takes a file."""
        probe = self.staging_dir / f"probe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError:
            return False
        return True

    def sweep(self) -> int:
        """Removes what killed processes left half-written, and returns how many files there were.

        Unfinished uploads stay: their senders may come back for them.
        """
        left = [path for kind in ("put-*", "probe-*") for path in self.staging_dir.glob(kind)]
        for path in left:
            path.unlink()
        return len(left)

    # ------------------------------------------------------------ reading

    def size(self, digest: str) -> int:
        """Raises NotFound."""
        return self._row(digest).size

    def open(self, digest: str) -> BinaryIO:
        """The blob as a seekable file. Raises NotFound, and StoreSpoilt if its bytes are not those of its name."""
        row = self._row(digest)
        self.verify(row)
        return self._open(row)

    def _open(self, blob: Stored) -> BinaryIO:
        if blob.inline is not None:
            return io.BytesIO(blob.inline)
        if self._root:
            return (self._root / _key(blob.digest)).open("rb")
        return io.BufferedReader(_StoreFile(self._store, _key(blob.digest), self._readahead_bytes), PIECE_BYTES)

    def verify(self, blob: Stored) -> None:
        """Hashes a blob, the first time that this process meets it. Raises StoreSpoilt."""
        if blob.digest in self._sound:
            return
        found = hashlib.sha256()
        try:
            with self._open(blob) as file:
                while piece := file.read(PIECE_BYTES):
                    found.update(piece)
        except FileNotFoundError:
            raise StoreSpoilt(f"blob {blob.digest} is missing from the store") from None
        if f"sha256:{found.hexdigest()}" != blob.digest:
            raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name")
        self._sound.add(blob.digest)

    def read(self, digest: str) -> bytes:
        """A whole blob. Raises NotFound."""
        with self.open(digest) as file:
            return file.read()

    async def stream(self, blob: Stored, start: int, stop: int) -> AsyncIterator[bytes]:
        """Bytes `start` to `stop` of a blob, piece by piece, as the receiver takes them."""
        if blob.inline is not None:
            yield blob.inline[start:stop]
        elif self._root:
            # Read in a thread of ours: the store's own stream takes ten times the processor time over a local file.
            with (self._root / _key(blob.digest)).open("rb", buffering=0) as file:
                file.seek(start)
                while start < stop and (
                    piece := await to_thread.run_sync(file.read, min(STREAM_BYTES, stop - start))
                ):
                    start += len(piece)
                    yield piece
        elif start < stop:
            options: obstore.GetOptions = {"range": (start, stop)}
            result = await obstore.get_async(self._store, _key(blob.digest), options=options)
            async for piece in result.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def find(self, session: Session, digest: str) -> Stored:
        """Raises NotFound."""
        row = session.get(BlobRow, digest)
        if row is None:
            raise NotFound(f"there is no blob {digest}")
        return Stored(row.digest, row.size, row.inline)

    def _row(self, digest: str) -> Stored:
        with self._database.snapshot() as session:
            return self.find(session, digest)


class BlobWriter:
    """Bytes on their way to becoming a blob; what is left unfinished at the end of `with` leaves nothing behind.

    Few bytes stay in memory; more go to a file, and are hashed as they pass.
    """

    def __init__(self, blobs: Blobs, inline_bytes: int) -> None:
        self._blobs = blobs
        self._inline_bytes = inline_bytes
        self._path = blobs.staging_dir / f"put-{uuid.uuid4().hex}"
        self._head = bytearray()
        self._file: BinaryIO | None = None
        self._size = 0
        self._received = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        if self._file:
            self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, piece: bytes | memoryview) -> None:
        self._size += len(piece)
        self._received.update(piece)
        if self._file:
            self._file.write(piece)
        elif self._size <= self._inline_bytes:
            self._head += piece
        else:
            self._file = self._path.open("xb")
            self._file.write(self._head)
            self._file.write(piece)
            self._head.clear()

    def finish(self) -> Stored:
        """Makes the bytes safe under their digest. To be entered with `record`."""
        digest = f"sha256:{self._received.hexdigest()}"
        if not self._file:
            return Stored(digest, self._size, bytes(self._head))
        self._file.close()
        return self._blobs.adopt(self._path, digest, self._size)


class _StoreFile(io.RawIOBase):
    """An object of the store as a plain readable file."""

    def __init__(self, store: obstore.store.ObjectStore, key: str, readahead_bytes: int) -> None:
        self._reader = obstore.open_reader(store, key, buffer_size=readahead_bytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._reader.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._reader.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


def _key(digest: str) -> str:
    hexadecimal = digest.removeprefix("sha256:")
    return f"{hexadecimal[:2]}/{hexadecimal}"


def _flush(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
