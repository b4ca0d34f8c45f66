"""Blobs under their SHA-256: small ones in the database, larger ones in a local folder or an S3-compatible store.

A blob is never visible in part. Its bytes are written under a temporary name, flushed to the disk, renamed to their
digest and then entered in the `blobs` table; a blob without a row does not exist.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, Self, cast

import obstore
from anyio import to_thread
from obstore.store import LocalStore
from sqlalchemy import Row, bindparam, select, update
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.object_store import Objects, key_of
from tessera.coordinator.blobs.portions import STREAM_BYTES, InlineReader, Portion, cut, require_all
from tessera.coordinator.blobs.staging import StagingArea, sweep
from tessera.coordinator.db.engine import Database, insert_missing
from tessera.coordinator.db.tables import BlobRow
from tessera.coordinator.limits.cache import LruCache
from tessera.coordinator.limits.disk import is_full
from tessera.shared.problems import NotFound, StoreSpoilt
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.tensors.mmap_file import MappedFile, mapped

READAHEAD_BYTES = 128 << 20
"""Memory for reading ahead in an object store, which a merge divides among its updates."""

PIECE_BYTES = 1 << 18

ROWS_KEPT = 4_096
"""Cached rows of the table: a merge reads every update once for each block."""
ROWS_BYTES = 16 << 20
"""Most bytes of the small blobs in them."""

MAPS_KEPT = 64
"""Files that stay mapped, for the same reason. A map takes address space and a descriptor, but no memory."""

SOUND_KEPT = 1 << 16
"""Blobs known to be sound; a forgotten one is hashed again. Bounded, as other processes remove blobs unnoticed."""

_HEXADECIMAL = re.compile("[0-9a-f]{64}")

HASHES = 64
"""Locks of blobs that are being hashed."""

FLUSHES = 4
"""Threads that flush files; they mostly wait for the disk."""


_ROWS = select(BlobRow.digest, BlobRow.size, BlobRow.inline, BlobRow.created_at, BlobRow.stamp).where(
    BlobRow.digest.in_(bindparam("digests", expanding=True))
)


class StagingOnOtherDisk(RuntimeError):
    """The staging folder is on another file system than the blobs."""


class Blobs:
    def __init__(
        self,
        database: Database,
        url: str,
        staging_dir: Path,
        inline_bytes: int,
        readahead_bytes: int = READAHEAD_BYTES,
    ) -> None:
        self._database = database
        self.inline_bytes = inline_bytes
        self._url = url if "://" in url else Path(url).absolute()
        self.staging_dir = staging_dir.absolute()
        # Closed to other users of the machine: it holds sites' updates and restricted models. The folder around it is
        # there, or its name is probably misspelt.
        staging_dir.mkdir(mode=0o700, exist_ok=True)
        self.unfinished = StagingArea(self.staging_dir)
        # The disk may have corrupted earlier blobs, so each whose file has changed since it was last verified is
        # hashed before its first use. Later ones were hashed when they were received, by this or another process.
        self._sound: LruCache[None] = LruCache(SOUND_KEPT)
        # A blob is hashed once, however many threads need it. Two blobs of one lock only wait for each other.
        self._hashing = [threading.Lock() for _ in range(HASHES)]
        self.began_at = database.now()
        # Blobs are immutable, and missing ones are not cached.
        self._rows: LruCache[StoredBlob] = LruCache(ROWS_KEPT, ROWS_BYTES, lambda row: len(row.inline or b""))
        self._map = lru_cache(maxsize=MAPS_KEPT)(mapped)
        self._objects = Objects(url, readahead_bytes) if "://" in url else None
        # Used unless there is an object store.
        self._root = Path(url)
        if self._objects is None:
            self._root.mkdir(mode=0o700, exist_ok=True)

    def require_same_disk(self) -> None:
        """Raise StagingOnOtherDisk unless finished files can be renamed into the store. Reading needs no staging."""
        if self._objects is None and self._root.stat().st_dev != self.staging_dir.stat().st_dev:
            raise StagingOnOtherDisk(
                f"{self.staging_dir} and {self._url} are on different file systems; an upload is finished by a "
                "rename. Set TESSERA_STAGING_DIR to a folder on the file system of TESSERA_BLOB_URL."
            )

    # ------------------------------------------------------------ writing

    def put(self, pieces: Iterable[bytes | memoryview]) -> StoredBlob:
        """Store bytes durably under their digest. Enter them with `record`."""
        with self.writer() as writer:
            for piece in pieces:
                writer.write(piece)
            return writer.finish()

    def writer(self) -> BlobWriter:
        """Return a writer that stores a blob piece by piece. Several may be open at a time."""
        return BlobWriter(self)

    @contextmanager
    def file(self) -> Iterator[BinaryIO]:
        """Yield a seekable file to write and `keep`; without `keep` it leaves nothing behind."""
        path = self.unfinished.path()
        try:
            with path.open("x+b") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def keep(self, file: BinaryIO) -> StoredBlob:
        """Store the bytes of a `file` durably under their digest. Enter them with `record`."""
        file.seek(0)
        computed = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
        return self.adopt(Path(file.name), f"sha256:{computed.hexdigest()}", file.tell())

    def batch(self) -> BlobBatch:
        """Return a batch of blobs that are durable at the end of `with`, after one wait for the disk."""
        return BlobBatch(self)

    def adopt(self, path: Path, digest: str, size: int) -> StoredBlob:
        """Store a finished file of the staging folder under its checked digest."""
        if size <= self.inline_bytes:
            return StoredBlob(digest, size, path.read_bytes())
        self.move(path, digest)
        self.flush_names([digest])
        return StoredBlob(digest, size)

    def move(self, path: Path, digest: str) -> None:
        """Store a file as `adopt` does, but without making its name durable: `flush_names` does."""
        if self._objects:
            self._objects.put(digest, path)
            path.unlink(missing_ok=True)
            return
        # Its last bytes may have come long ago, and garbage collection removes an old file without a row.
        os.utime(path)
        flush(path)
        final = self._path(digest)
        final.parent.mkdir(parents=True, exist_ok=True)
        # Files of the same name have the same content, so replacing one changes nothing.
        path.replace(final)
        self._sound.keep(digest, None)

    def flush_names(self, digests: Iterable[str]) -> None:
        if self._objects is None and (folders := {self._path(digest).parent for digest in digests}):
            for folder in (*sorted(folders), self._root):
                flush(folder)

    def record(self, session: Session, now: float, stored: Sequence[StoredBlob]) -> None:
        """Enter blobs in the table; existing rows stay as they are."""
        rows = [
            {
                "digest": blob.digest,
                "size": blob.size,
                "inline": blob.inline,
                "created_at": now,
                "stamp": None if blob.inline is not None else self._stamp(blob.digest),
            }
            for blob in stored
        ]
        insert_missing(session, BlobRow, rows)

    def save(self, pieces: Iterable[bytes | memoryview]) -> StoredBlob:
        """Store and record bytes."""
        stored = self.put(pieces)
        with self._database.transaction() as session:
            self.record(session, self._database.now(), [stored])
        return stored

    def writable(self) -> bool:
        """Return True if the staging folder accepts a file, and an object store accepts and returns bytes.

        A full disk does not count as a fault: `DiskSpace` reports it.
        """
        probe = self.staging_dir / f"probe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"probe")
        except OSError as fault:
            if not is_full(fault):
                return False
        finally:
            # A full disk accepts the file, but not its bytes.
            with suppress(OSError):
                probe.unlink()
        return self._objects is None or self._objects.serves()

    def sweep(self) -> int:
        """Remove unfinished files of killed processes; return their number. Unfinished uploads stay."""
        for probe in self.staging_dir.glob("probe-*"):
            probe.unlink(missing_ok=True)
        for aside in self.staging_dir.glob("gone-*"):
            # Its removal was interrupted before its age was checked. At worst it is a stray file.
            with suppress(FileNotFoundError):
                aside.replace(self._path(aside.name.removeprefix("gone-")))
        return sweep(self.staging_dir)

    # ------------------------------------------------------------ removing

    def discard(self, digest: str, before: float) -> bool:
        """Remove the bytes of a blob without a row unless they were written since `before`; return True if it did."""
        self._sound.drop(digest)
        self._rows.drop(digest)
        if self._objects:
            return self._objects.remove(digest, before)
        # Its age is checked at a path where no other process can replace it.
        path, aside = self._path(digest), self.staging_dir / f"gone-{digest.removeprefix('sha256:')}"
        with suppress(FileNotFoundError):
            path.replace(aside)
            if aside.stat().st_mtime < before:
                aside.unlink()
                return True
            aside.replace(path)
        return False

    def listed(self, before: float, at_a_time: int) -> Iterator[list[str]]:
        """Yield the digests of the stored objects written before this instant, in lists."""
        pages = self._objects.listed(at_a_time) if self._objects else None
        for objects in pages or obstore.list(LocalStore(self._root), chunk_size=at_a_time):
            keys = [meta["path"] for meta in objects if meta["last_modified"].timestamp() < before]
            yield [f"sha256:{name}" for key in keys if _HEXADECIMAL.fullmatch(name := key.rpartition("/")[2])]

    # ------------------------------------------------------------ reading

    def size(self, digest: str) -> int:
        """Return the size of a blob. Raises NotFound."""
        return self._row(digest).size

    def open(self, digest: str) -> BinaryIO:
        """Return the blob as a seekable file. Raises NotFound, and StoreSpoilt if its bytes are corrupt."""
        row = self._row(digest)
        self.verify(row)
        if self._objects is None and row.inline is None:
            return cast("BinaryIO", MappedFile(partial(self._map, self._path(digest))))
        return self._open(row)

    def _open(self, blob: StoredBlob) -> BinaryIO:
        if blob.inline is not None:
            return io.BytesIO(blob.inline)
        if self._objects:
            return self._objects.open(blob)
        return self._path(blob.digest).open("rb", buffering=0)

    def _path(self, digest: str) -> Path:
        """Return the path of a blob in the local folder."""
        return self._root / key_of(digest)

    def _stamp(self, digest: str) -> str | None:
        """Return the state of a blob's local file."""
        with suppress(FileNotFoundError):
            if self._objects is None:
                stat = self._path(digest).stat()
                return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        return None

    def is_sound(self, blob: StoredBlob) -> bool:
        """Return True if this process knows the blob to be sound, or its file is as it was when that was known."""
        if self._objects and blob.inline is None:
            return self._objects.knows(blob)
        if blob.digest not in self._sound:
            if blob.stamp is None or blob.stamp != self._stamp(blob.digest):
                return False
            self._sound.keep(blob.digest, None)
        return True

    def verify(self, blob: StoredBlob) -> str | None:
        """Hash a blob unless it is known to be sound; return its stamp if it was hashed. Raises StoreSpoilt and
        StoreAway."""
        with self._hashing[hash(blob.digest) % HASHES]:
            return None if self.is_sound(blob) else self.rehash(blob)

    def rehash(self, blob: StoredBlob) -> str | None:
        """Hash a blob and return its stamp. Raises StoreSpoilt if it is missing or its bytes do not match its digest,
        and StoreAway."""
        if self._objects and blob.inline is None:
            return self._objects.hash(blob)
        stamp = self._stamp(blob.digest)
        try:
            with self._open(blob) as file:
                computed = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
        except FileNotFoundError:
            raise StoreSpoilt(f"blob {blob.digest} is missing from the store") from None
        if f"sha256:{computed.hexdigest()}" != blob.digest:
            raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name")
        self._sound.keep(blob.digest, None)
        return stamp

    def read(self, digest: str) -> bytes:
        """Return a whole blob. Raises NotFound."""
        with self.open(digest) as file:
            return file.read()

    async def stream_all(self, portions: Sequence[Portion], start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield bytes `start` to `stop` of the portions, piece by piece, as fast as the receiver reads them."""
        small = InlineReader(portions, self._read_inline)
        for portion, first, last in cut(portions, start, stop):
            if portion.inline:
                yield (await to_thread.run_sync(small.read, portion))[first:last]
            else:
                async for piece in self.stream(portion.blobs[0], first, last):
                    yield piece

    async def stream(self, blob: StoredBlob, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield bytes `start` to `stop` of a blob in the same way."""
        if blob.inline is not None:
            yield blob.inline[start:stop]
        elif self._objects:
            while start < stop:
                # A request for each piece, so that a slow receiver blocks no connection to the store.
                piece = await to_thread.run_sync(self._objects.read, blob, start, min(start + STREAM_BYTES, stop))
                start += len(piece)
                yield piece
        else:
            # Read in a thread here: the store library's stream takes ten times the processor time for a local file.
            try:
                file = self._path(blob.digest).open("rb", buffering=0)
            except FileNotFoundError:
                raise StoreSpoilt(f"blob {blob.digest} is missing from the store") from None
            with file:
                file.seek(start)
                while start < stop and (
                    piece := await to_thread.run_sync(file.read, min(STREAM_BYTES, stop - start))
                ):
                    start += len(piece)
                    yield piece

    def find(self, session: Session, digest: str) -> StoredBlob:
        """Return a blob's row. Raises NotFound."""
        row = session.execute(_ROWS, {"digests": [digest]}).one_or_none()
        if row is None:
            raise NotFound(f"there is no blob {digest}")
        return self._stored(row)

    def portions(self, session: Session, digests: Sequence[str]) -> list[Portion]:
        """Return blobs in the given order, in portions that take little memory to read. Raises NotFound.

        The bytes are not read: four thousand small blobs take 256 MiB.
        """
        columns = select(BlobRow.digest, BlobRow.size, BlobRow.created_at, BlobRow.inline.is_not(None), BlobRow.stamp)
        single = {}
        rows = session.execute(columns.where(BlobRow.digest.in_(set(digests))))
        for digest, size, created_at, inline, stamp in rows:
            self._note_sound(digest, created_at)
            single[digest] = Portion((StoredBlob(digest, size, stamp=stamp),), inline)
        require_all(digests, single)
        portions: list[Portion] = []
        for digest in digests:
            last, one = portions[-1] if portions else None, single[digest]
            if last and last.inline and one.inline and last.size + one.size <= STREAM_BYTES:
                portions[-1] = Portion((*last.blobs, *one.blobs), inline=True)
            else:
                portions.append(one)
        return portions

    def unverified(self, portions: Iterable[Portion]) -> list[Portion]:
        """Return the portions that have to be hashed before they are sent."""
        return [
            portion
            for portion in portions
            if not (
                all(blob.digest in self._sound for blob in portion.blobs)
                if portion.inline
                else self.is_sound(portion.blobs[0])
            )
        ]

    def verify_portion(self, portion: Portion) -> None:
        """Verify the blobs of a portion, and store the verdict for later processes. Raises StoreSpoilt and
        StoreAway."""
        first = portion.blobs[0]
        if portion.inline and first.inline is None:
            self._read_inline(portion)
        elif (stamp := self.verify(first)) is not None:
            with self._database.transaction() as session:
                session.execute(update(BlobRow).where(BlobRow.digest == first.digest).values(stamp=stamp))

    def _read_inline(self, portion: Portion) -> bytes:
        """Return the bytes of a portion of small blobs. Raises NotFound if one was removed, and StoreSpoilt."""
        if len(portion.blobs) == 1 and portion.blobs[0].inline is not None:
            return portion.blobs[0].inline
        digests = [blob.digest for blob in portion.blobs]
        with self._database.snapshot() as session:
            rows = session.execute(select(BlobRow.digest, BlobRow.inline).where(BlobRow.digest.in_(digests)))
            contents = {digest: inline for digest, inline in rows if inline is not None}
        require_all(digests, contents)
        for digest in digests:
            self.verify(StoredBlob(digest, len(contents[digest]), contents[digest]))
        return b"".join(contents[digest] for digest in digests)

    def _stored(self, row: Row[str, int, bytes | None, float, str | None]) -> StoredBlob:
        self._note_sound(row.digest, row.created_at)
        return StoredBlob(row.digest, row.size, row.inline, row.stamp)

    def _note_sound(self, digest: str, created_at: float) -> None:
        # A later instant is of before the clock was set back.
        if self.began_at < created_at <= self._database.now():
            self._sound.keep(digest, None)

    def __contains__(self, blob: StoredBlob) -> bool:
        """Return True if the store has an object of this digest and size, regardless of the table."""
        if self._objects:
            return self._objects.size(blob.digest) == blob.size
        with suppress(FileNotFoundError):
            return self._path(blob.digest).stat().st_size == blob.size
        return False

    def reading_ahead(self, digests: Sequence[str]) -> AbstractContextManager[None]:
        """Return a block in which these blobs are read beside each other, each in many parts."""
        return self._objects.reading_ahead(digests) if self._objects else nullcontext()

    def expect(self, digests: Collection[str]) -> None:
        """Cache the rows of blobs that will be read, in one query; missing ones are reported when they are read."""
        wanted = [digest for digest in digests if digest not in self._rows]
        if len(wanted) > 1:
            with self._database.snapshot() as session:
                for row in session.execute(_ROWS, {"digests": wanted}):
                    self._rows.keep(row.digest, self._stored(row))

    def _row(self, digest: str) -> StoredBlob:
        if (known := self._rows.get(digest)) is None:
            with self._database.snapshot() as session:
                known = self.find(session, digest)
            self._rows.keep(digest, known)
        return known


class BlobWriter:
    """A blob that is being written; without `finish`, it leaves nothing behind at the end of `with`.

    Its bytes are hashed as they come. A small blob stays in memory, a larger one is written to a file.
    """

    def __init__(self, blobs: Blobs, batch: BlobBatch | None = None) -> None:
        self._blobs = blobs
        self._batch = batch
        self._path: Path | None = None
        self._head = bytearray()
        self._file: BinaryIO | None = None
        self._size = 0
        self._received = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        try:
            if self._file:
                # On a full disk this fails too, for buffered bytes.
                self._file.close()
        finally:
            if self._path:
                self._path.unlink(missing_ok=True)

    def write(self, piece: bytes | memoryview) -> None:
        self._size += len(piece)
        self._received.update(piece)
        if self._file:
            self._file.write(piece)
        elif self._size <= self._blobs.inline_bytes:
            self._head += piece
        else:
            self._path = self._blobs.unfinished.path()
            self._file = self._path.open("xb")
            self._file.write(self._head)
            self._file.write(piece)
            self._head.clear()

    def finish(self) -> StoredBlob:
        """Store the bytes durably under their digest, or leave that to the batch. Enter them with `record`."""
        digest = f"sha256:{self._received.hexdigest()}"
        if not self._file or not self._path:
            return StoredBlob(digest, self._size, bytes(self._head))
        self._file.close()
        if self._batch is None:
            return self._blobs.adopt(self._path, digest, self._size)
        self._batch.take(self._path, digest)
        # The batch owns the file from here on.
        self._path = None
        return StoredBlob(digest, self._size)


class BlobBatch:
    """Blobs that become durable together. Its writers may run in several threads."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._pool = ThreadPoolExecutor(FLUSHES, thread_name_prefix="flush")
        self._taken: list[tuple[Path, str, Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *fault: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        try:
            if kind is None:
                for _, _, moved in self._taken:
                    moved.result()
                self._blobs.flush_names(digest for _, digest, _ in self._taken)
        finally:
            for path, _, _ in self._taken:
                path.unlink(missing_ok=True)

    def writer(self) -> BlobWriter:
        return BlobWriter(self._blobs, self)

    def take(self, path: Path, digest: str) -> None:
        """Add a finished file of the staging folder."""
        self._taken.append((path, digest, self._pool.submit(self._blobs.move, path, digest)))


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
