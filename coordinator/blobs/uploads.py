"""Uploads that can be interrupted at any byte and resumed.

The length of the staging file is the offset, so that receiving bytes writes nothing to the database and a crash loses
none of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.quota import Quota
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database, insert_or_update
from tessera.coordinator.db.tables import SiteRow, UploadRow, new_id
from tessera.coordinator.limits.disk import RETRY_SECONDS, DiskSpace
from tessera.coordinator.limits.thread_pool import FairThreadPool
from tessera.shared.problems import (
    BadRequest,
    DigestMismatch,
    NotFound,
    OffsetMismatch,
    StoreFull,
    TooLarge,
    UploadBusy,
)
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.tensors.lazy import digest_of

LEAST_BYTES_PER_SECOND = 1024
"""Minimum rate of a sender: a slower one would keep its reservations and its connection for ever."""
RATE_SECONDS = 120.0
"""Time over which the rate is measured."""
WRITE_BYTES = 1 << 20
STAGED = "upload-"
"""Prefix of a staging file's name; the upload's id follows."""
HASHED_AT_A_TIME = 64
"""Pieces of `WRITE_BYTES` hashed in one turn."""


@dataclass(frozen=True)
class Upload:
    id: str
    owner: str
    digest: str
    length: int
    complete: bool


@dataclass(frozen=True)
class Uploads:
    database: Database
    blobs: Blobs
    disk: DiskSpace
    quota: Quota
    idle_timeout_seconds: float
    threads: FairThreadPool
    """For slow work, in which the owners take turns."""

    # ------------------------------------------------------------ the table

    def announce(self, owner: str, digest: str, length: int, *, site_id: str | None = None) -> Upload:
        """Return a new upload, or the owner's earlier one of this digest.

        Raises BadRequest if it is complete with another length, StoreFull, and QuotaExceeded if the owner is a site.
        """
        with self.database.transaction() as session:
            same = (UploadRow.owner == owner) & (UploadRow.digest == digest)
            row = session.scalars(select(UploadRow).where(same)).one_or_none()
            if row is None:
                row = UploadRow(id=new_id(), owner=owner, digest=digest, length=length, complete=False)
                self._permit(session, site_id, row, length)
                session.add(row)
            elif row.length != length and row.complete:
                raise BadRequest(f"{row.digest} has {row.length} bytes, not {length}")
            elif row.length != length:
                # One of the announcements is wrong; the bytes will show which.
                more, row.length = max(0, length - row.length), length
                self._permit(session, site_id, row, more)
                self._discard(row.id)
            # Keeps garbage collection from removing it.
            row.created_at = self.database.now()
            return _record(row)

    def _permit(self, session: Session, site_id: str | None, row: UploadRow, more_bytes: int) -> None:
        if site_id is not None:
            # Concurrent announcements of one site would not see each other.
            session.get_one(SiteRow, site_id, with_for_update=True)
        others = (UploadRow.owner == row.owner) & (UploadRow.id != row.id) & ~UploadRow.complete
        unfinished = session.scalars(select(UploadRow).where(others)).all()
        # Bytes that this owner announced and has not sent need space too. Other owners' bytes do not count: they may
        # never come. Received bytes are no longer free.
        unsent = sum(each.length - self.offset(_record(each)) for each in (*unfinished, row))
        self.disk.require(unsent)
        if site_id is not None:
            if not self.disk.has(2 * unsent):
                raise StoreFull(
                    f"the site has not sent {unsent} bytes of its uploads, more than half of the free disk space "
                    "beyond the reserve (setting disk_reserve_bytes)",
                    remedy="Finish the site's other uploads first, or have an administrator make room.",
                    retry_after_seconds=RETRY_SECONDS,
                )
            self.quota.spend(session, self.database.now(), site_id, len(unfinished), more_bytes)

    def find(self, upload_id: str, owner: str) -> Upload:
        """Raise NotFound if there is no such upload of this owner."""
        with self.database.snapshot() as session:
            row = session.get(UploadRow, upload_id)
            if row is None or row.owner != owner:
                raise NotFound(f"there is no upload {upload_id}", remedy="Announce the blob again.")
            return _record(row)

    def forget(self, upload_id: str, before: float) -> bool:
        """Remove an unfinished upload unless it was announced or written to since `before`; return True if it did."""
        with self.database.transaction() as session:
            row = session.get(UploadRow, upload_id)
            if row is None or row.complete or row.created_at >= before:
                return False
            path = self._path(row.id)
            if path.exists() and path.stat().st_mtime >= before:
                return False
            with suppress(UploadBusy):
                self._discard(row.id)
                session.delete(row)
                return True
        return False

    def sweep(self, before: float) -> int:
        """Remove staging files without an unfinished upload, unless written to since `before`; return their number.

        `enter` completes an upload without its file, and a process with another staging folder forgets it without.
        """
        staged = [path.name.removeprefix(STAGED) for path in self.blobs.staging_dir.glob(f"{STAGED}*")]
        with self.database.snapshot() as session:
            unfinished = set(session.scalars(select(UploadRow.id).where(~UploadRow.complete)))
        swept = 0
        for upload_id in sorted(set(staged) - unfinished):
            with suppress(FileNotFoundError, UploadBusy):
                if self._path(upload_id).stat().st_mtime < before:
                    self._discard(upload_id)
                    swept += 1
        return swept

    def offset(self, upload: Upload) -> int:
        """Return the number of bytes that have arrived."""
        if upload.complete:
            return upload.length
        path = self._path(upload.id)
        return path.stat().st_size if path.exists() else 0

    # ------------------------------------------------------------ the bytes

    async def whole(self, upload: Upload, body: AsyncIterator[bytes], begun: bytes = b"") -> int:
        """Receive a blob in the request that announces it; return the number of received bytes. `begun` are the bytes
        that were read already. A small blob is not staged."""
        if upload.length > WRITE_BYTES:
            return await self.append(upload, 0, body, begun)
        if end := self.offset(upload):
            raise _elsewhere(upload, end, 0)
        received = bytearray()
        async for piece in self._pieces(body, begun):
            received += piece
            if len(received) > upload.length:
                raise _longer(upload)
        if len(received) < upload.length:
            raise BadRequest(
                f"{len(received)} of {upload.length} bytes were received", remedy="Send the whole blob again."
            )
        await self.threads.run(upload.owner, self.keep, upload, bytes(received))
        return upload.length

    def enter(
        self, session: Session, now: float, owner: str, stored: StoredBlob, *, site_id: str, more_bytes: int = 0
    ) -> None:
        """Record a blob of a site that came whole as a complete upload. `more_bytes` count against the quota as well.

        Raises StoreFull and QuotaExceeded.
        """
        self.disk.require(stored.size)
        self.quota.spend(session, now, site_id, 0, stored.size + more_bytes)
        self.blobs.record(session, now, [stored])
        row = {"id": new_id(), "owner": owner, "digest": stored.digest}
        state = {"length": stored.size, "complete": True, "created_at": now}
        insert_or_update(session, UploadRow, ("owner", "digest"), {**row, **state}, state)

    def keep(self, upload: Upload, data: bytes) -> None:
        """Store the bytes of an announced blob. Raise DigestMismatch."""
        # Checked even if the blob is stored already, so that a repeated request gets the same answer.
        require_digest(upload.digest, data)
        if not upload.complete:
            self._complete(upload, self.blobs.put([data]))

    async def append(self, upload: Upload, offset: int, body: AsyncIterator[bytes], begun: bytes = b"") -> int:
        """Append bytes at `offset` and return the new offset; complete the upload when all are received. `begun` has
        those that were read already.

        Raises OffsetMismatch, UploadBusy, TooLarge, DigestMismatch, StoreFull.
        """
        if upload.complete:
            return upload.length
        with self._locked(upload.id) as file, self.disk.expecting(max(0, upload.length - offset)) as written:
            upload = await self.threads.run(upload.owner, self._locked_row, upload, file, offset)
            # Hashed while it is received, or once when it is whole: hashing each part again would let a sender of
            # empty parts cause unlimited work.
            received = hashlib.sha256() if offset == 0 else None

            def write(piece: memoryview) -> None:
                while piece:
                    count = file.write(piece)
                    if received is not None:
                        received.update(piece[:count])
                    piece = piece[count:]
                    written(count)

            await self._write_pieces(upload, offset, self._pieces(body, begun), write)
            if file.tell() == upload.length:
                received = received or await self._hashed(upload.owner, file)
                await self.threads.run(upload.owner, self._finish, upload, file, received.hexdigest())
            return file.tell()

    async def _write_pieces(
        self, upload: Upload, offset: int, pieces: AsyncIterator[bytes], write: Callable[[memoryview], None]
    ) -> None:
        # One object: a sender of single bytes would have a million of them held, and counted at each byte.
        pending = bytearray()
        end = offset

        def flush() -> None:
            nonlocal pending
            # Emptied first: a full disk accepts a part, which must not be written again.
            piece, pending = pending, bytearray()
            write(memoryview(piece))

        try:
            async for piece in pieces:
                end += len(piece)
                if end > upload.length:
                    raise _longer(upload)
                pending += piece
                if len(pending) >= WRITE_BYTES:
                    await self.threads.run_to_end(upload.owner, flush)
            # In a thread: the disk may be slow.
            await self.threads.run_to_end(upload.owner, flush)
        finally:
            # Received bytes are kept even when the sender is disconnected, so that it can resume after them.
            flush()

    async def _pieces(self, body: AsyncIterator[bytes], begun: bytes) -> AsyncIterator[bytes]:
        """Yield the pieces of a body, of which `begun` was read already. A sender that is silent, or slower than the
        minimum rate, is disconnected."""
        if begun:
            yield begun
        arrived, waited = 0, 0.0
        while True:
            began_at = time.monotonic()
            try:
                async with asyncio.timeout(self.idle_timeout_seconds):
                    piece = await anext(body, None)
            except TimeoutError:
                raise self._too_slow() from None
            if piece is None:
                return
            arrived, waited = arrived + len(piece), waited + time.monotonic() - began_at
            if waited >= RATE_SECONDS:
                if arrived < LEAST_BYTES_PER_SECOND * waited:
                    raise self._too_slow()
                arrived, waited = 0, 0.0
            yield piece

    def _too_slow(self) -> BadRequest:
        return BadRequest(
            f"no byte was received for {self.idle_timeout_seconds:g} s, or fewer than {LEAST_BYTES_PER_SECOND} a "
            f"second within {RATE_SECONDS:g} s",
            remedy="Resume the upload at its offset.",
        )

    async def _hashed(self, owner: str, file: FileIO) -> hashlib._Hash:
        """Return the hash of a file, computed in short turns so that other owners do not wait."""
        received = hashlib.sha256()

        def some() -> bool:
            for _ in range(HASHED_AT_A_TIME):
                piece = file.read(WRITE_BYTES)
                received.update(piece)
            return bool(piece)

        file.seek(0)
        while await self.threads.run(owner, some):
            pass
        return received

    def _finish(self, upload: Upload, file: FileIO, hexadecimal: str) -> None:
        path = self._path(upload.id)
        if f"sha256:{hexadecimal}" != upload.digest:
            path.unlink()
            raise _mismatch(upload.digest, f"sha256:{hexadecimal}")
        self._complete(upload, self.blobs.adopt(path, upload.digest, upload.length))
        # A small blob is in the table now. If it was moved, the path may hold the file of a later request.
        if _is_at(path, file):
            path.unlink()

    def _complete(self, upload: Upload, stored: StoredBlob) -> None:
        with self.database.transaction() as session:
            self.blobs.record(session, self.database.now(), [stored])
            row = session.get(UploadRow, upload.id)
            if row is None:
                raise NotFound(f"upload {upload.id} was removed meanwhile", remedy="Announce the blob again.")
            # The bytes match the digest, so this is its length, even if another was announced meanwhile.
            row.length, row.complete = upload.length, True

    def _path(self, upload_id: str) -> Path:
        return self.blobs.staging_dir / f"{STAGED}{upload_id}"

    @contextmanager
    def _locked(self, upload_id: str) -> Iterator[FileIO]:
        """Yield the staging file, for one request at a time. Raises UploadBusy."""
        path = self._path(upload_id)
        with path.open("ab+", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UploadBusy(f"upload {upload_id} is being written to", retry_after_seconds=1) from None
            # Another request may have finished or discarded the file before it was locked.
            if not _is_at(path, file):
                raise UploadBusy(f"upload {upload_id} was being written to", retry_after_seconds=0)
            yield file

    def _locked_row(self, upload: Upload, file: FileIO, offset: int) -> Upload:
        """Return the upload as the table has it under the lock of its file. Raise UploadBusy and OffsetMismatch."""
        upload = self.find(upload.id, upload.owner)
        if upload.complete:
            self._path(upload.id).unlink()
            raise UploadBusy(f"upload {upload.id} was finished by another request", retry_after_seconds=0)
        if (end := file.seek(0, os.SEEK_END)) != offset:
            raise _elsewhere(upload, end, offset)
        return upload

    def _discard(self, upload_id: str) -> None:
        """Remove the received bytes. Raises UploadBusy while a request sends more."""
        with self._locked(upload_id):
            self._path(upload_id).unlink()


def _is_at(path: Path, file: FileIO) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def find_finished(session: Session, owner: str, digest: str) -> Upload | None:
    """Return the owner's complete upload of this digest, or None."""
    row = session.scalars(select(UploadRow).where(_finished(owner, digest))).one_or_none()
    return _record(row) if row else None


def retain(session: Session, now: float, owner: str, digest: str) -> None:
    """Keep garbage collection from removing a complete upload before a row refers to it. Raise NotFound."""
    touched = update(UploadRow).where(_finished(owner, digest)).values(created_at=now).returning(UploadRow.id)
    if session.scalar(touched) is None:
        raise NotFound(f"{digest} was removed before it was submitted", remedy="Upload it again.")


def _finished(owner: str, digest: str) -> ColumnElement[bool]:
    return (UploadRow.owner == owner) & (UploadRow.digest == digest) & UploadRow.complete


def _elsewhere(upload: Upload, end: int, offset: int) -> OffsetMismatch:
    at = {"Upload-Offset": str(end)}
    return OffsetMismatch(f"upload {upload.id} is at offset {end}, not {offset}", headers=at)


def _longer(upload: Upload) -> TooLarge:
    return TooLarge(
        f"more bytes were sent than the {upload.length} announced",
        remedy="Announce the actual length, and send no more than that.",
    )


def require_digest(announced: str, data: bytes) -> None:
    """Raise DigestMismatch unless the bytes have the announced digest."""
    if (found := digest_of(data)) != announced:
        raise _mismatch(announced, found)


def _mismatch(announced: str, found: str) -> DigestMismatch:
    return DigestMismatch(f"{announced} was announced, but the bytes have {found}")


def _record(row: UploadRow) -> Upload:
    return Upload(row.id, row.owner, row.digest, row.length, row.complete)
