"""Uploads that may break off at any byte and go on.

How much has arrived is the length of the staging file, so nothing has to be written down while bytes come in, and
nothing is lost with the process that received them.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Database
from coordinator.storage.identity import new_id
from coordinator.storage.tables import UploadRow
from shared.blobs import Stored
from shared.problems import BadRequest, DigestMismatch, NotFound, OffsetMismatch, TooLarge, UploadBusy
from shared.tensors import digest_of

WRITE_BYTES = 1 << 20


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
    idle_seconds: float
    received: Callable[[float], object]
    """Told of the bytes as they come."""

    # ------------------------------------------------------------ the table

    def announce(self, owner: str, digest: str, length: int) -> Upload:
        """A new upload, or the one that this owner has announced before. Raises BadRequest if the lengths differ."""
        with self.database.transaction() as session:
            same = (UploadRow.owner == owner) & (UploadRow.digest == digest)
            row = session.scalars(select(UploadRow).where(same)).one_or_none()
            if row is None:
                row = UploadRow(id=new_id(), owner=owner, digest=digest, length=length, complete=False)
                session.add(row)
            elif row.length != length and row.complete:
                raise BadRequest(f"{digest} has {row.length} bytes, not {length}")
            elif row.length != length:
                # One of the announcements is mistaken; the bytes will tell which.
                row.length = length
                self._path(_record(row)).unlink(missing_ok=True)
            # What was announced again is not about to be removed.
            row.created_at = self.database.now()
            return _record(row)

    def find(self, upload_id: str, owner: str) -> Upload:
        """Raises NotFound if there is no such upload of this owner."""
        with self.database.snapshot() as session:
            row = session.get(UploadRow, upload_id)
            if row is None or row.owner != owner:
                raise NotFound(f"there is no upload {upload_id}", remedy="Announce the blob anew.")
            return _record(row)

    def forget(self, upload_id: str, before: float) -> bool:
        """Removes an unfinished upload, unless it was announced or written to since then."""
        with self.database.transaction() as session:
            row = session.get(UploadRow, upload_id)
            if row is None or row.complete or row.created_at >= before:
                return False
            path = self._path(_record(row))
            if path.exists() and path.stat().st_mtime >= before:
                return False
            session.delete(row)
        # Who is writing to it at this moment finds no such upload at the end, and announces it anew.
        path.unlink(missing_ok=True)
        return True

    def offset(self, upload: Upload) -> int:
        """How many bytes have arrived."""
        if upload.complete:
            return upload.length
        path = self._path(upload)
        return path.stat().st_size if path.exists() else 0

    # ------------------------------------------------------------ the bytes

    async def whole(self, upload: Upload, body: AsyncIterator[bytes]) -> None:
        """A blob that comes in the request that announces it. A small one never touches the staging folder."""
        if upload.length > WRITE_BYTES:
            await self.append(upload, 0, body)
            return
        received = bytearray()
        async with self._moving() as came:
            async for piece in body:
                came(piece)
                received += piece
                if len(received) > upload.length:
                    raise _longer(upload)
        if len(received) < upload.length:
            raise BadRequest(f"{len(received)} bytes came of {upload.length}", remedy="Send the whole blob again.")
        await asyncio.to_thread(self.keep, upload, bytes(received))

    def keep(self, upload: Upload, data: bytes) -> None:
        """Takes a blob that is here whole. Raises DigestMismatch."""
        if upload.complete:
            return
        if digest_of(data) != upload.digest:
            raise _mismatch(upload, digest_of(data))
        self._complete(upload, self.blobs.put([data]))

    async def append(self, upload: Upload, offset: int, body: AsyncIterator[bytes]) -> int:
        """Adds bytes from `offset` on and returns the new offset; completes the upload when all are here.

        Raises OffsetMismatch, UploadBusy, TooLarge, DigestMismatch.
        """
        if upload.complete:
            return upload.length
        with self._locked(upload) as file:
            received = await asyncio.to_thread(_resume, file, upload, offset)
            pending = bytearray()
            try:
                async with self._moving() as came:
                    async for piece in body:
                        came(piece)
                        pending += piece
                        if file.tell() + len(pending) > upload.length:
                            raise _longer(upload)
                        if len(pending) >= WRITE_BYTES:
                            await _to_the_end(_write, file, received, pending)
            finally:
                # What has come is kept even when the sender is cut off, so that it need not come again.
                if file.tell() + len(pending) <= upload.length:
                    _write(file, received, pending)
                file.flush()
            if file.tell() == upload.length:
                await asyncio.to_thread(self._finish, upload, received.hexdigest())
            return file.tell()

    @asynccontextmanager
    async def _moving(self) -> AsyncIterator[Callable[[bytes], None]]:
        """Bytes come in, and it is told of each piece: a slow sender is waited for, a silent one is not."""
        now = asyncio.get_running_loop().time
        try:
            # One deadline that is put off: to wait for each piece on its own costs a task a piece.
            async with asyncio.timeout(self.idle_seconds) as silence:

                def came(piece: bytes) -> None:
                    silence.reschedule(now() + self.idle_seconds)
                    self.received(len(piece))

                yield came
        except TimeoutError:
            if not silence.expired():
                raise
            raise BadRequest(
                f"no byte came for {self.idle_seconds:g} s", remedy="Go on with the upload from its offset."
            ) from None

    def _finish(self, upload: Upload, hexadecimal: str) -> None:
        path = self._path(upload)
        if f"sha256:{hexadecimal}" != upload.digest:
            path.unlink()
            raise _mismatch(upload, f"sha256:{hexadecimal}")
        self._complete(upload, self.blobs.adopt(path, upload.digest, upload.length))
        path.unlink(missing_ok=True)

    def _complete(self, upload: Upload, stored: Stored) -> None:
        with self.database.transaction() as session:
            self.blobs.record(session, self.database.now(), [stored])
            row = session.get(UploadRow, upload.id)
            if row is None:
                raise NotFound(f"upload {upload.id} was removed meanwhile", remedy="Announce the blob anew.")
            row.complete = True

    def _path(self, upload: Upload) -> Path:
        return self.blobs.staging_dir / f"upload-{upload.id}"

    @contextmanager
    def _locked(self, upload: Upload) -> Iterator[BinaryIO]:
        """The staging file, for one request at a time. Raises UploadBusy."""
        with self._path(upload).open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UploadBusy(f"upload {upload.id} is being written to", retry_after_seconds=1) from None
            yield file


def owned(session: Session, owner: str, digest: str) -> int | None:
    """The length of a complete upload of this owner, or None."""
    return session.scalar(select(UploadRow.length).where(_finished(owner, digest)))


def hand_in(session: Session, now: float, owner: str, digest: str) -> None:
    """Keeps a complete upload from being removed while what refers to it is entered. Raises NotFound."""
    touched = update(UploadRow).where(_finished(owner, digest)).values(created_at=now).returning(UploadRow.id)
    if session.scalar(touched) is None:
        raise NotFound(f"{digest} was removed before it was handed in", remedy="Upload it again.")


def _finished(owner: str, digest: str) -> ColumnElement[bool]:
    return (UploadRow.owner == owner) & (UploadRow.digest == digest) & UploadRow.complete


async def _to_the_end(work: Callable[..., None], *arguments: object) -> None:
    """Works in a thread and waits for it even when cancelled, so that nobody else touches what it works on."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _resume(file: BinaryIO, upload: Upload, offset: int) -> hashlib._Hash:
    """The hash of what is here, which must end at `offset`."""
    end = file.seek(0, 2)
    if end != offset:
        raise OffsetMismatch(
            f"upload {upload.id} stands at byte {end}, not {offset}", headers={"Upload-Offset": str(end)}
        )
    file.seek(0)
    received = hashlib.sha256()
    while piece := file.read(WRITE_BYTES):
        received.update(piece)
    return received


def _write(file: BinaryIO, received: hashlib._Hash, pending: bytearray) -> None:
    file.write(pending)
    received.update(pending)
    pending.clear()


def _longer(upload: Upload) -> TooLarge:
    return TooLarge(
        f"more bytes came than the {upload.length} that were announced",
        remedy="Announce the true length, and send no more than that.",
    )


def _mismatch(upload: Upload, found: str) -> DigestMismatch:
    return DigestMismatch(f"{upload.digest} was announced; the bytes are {found}")


def _record(row: UploadRow) -> Upload:
    return Upload(row.id, row.owner, row.digest, row.length, row.complete)
