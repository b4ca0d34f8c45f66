"""Files as memory maps, read without a copy: a reader computes on the page cache itself.

A disk that fails under a page ends the process (SIGBUS) instead of raising OSError. Mapped files were hashed
first, by reading them in the ordinary way, and are never written to again.
"""

import io
import mmap
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from weakref import WeakSet

RESIDENT_BYTES = 8 << 20
"""Bytes of mapped files whose pages stay in this process's memory after they were read, over all files."""


def mapped(path: Path) -> mmap.mmap | None:
    """Return the file's bytes. Nothing cannot be mapped, so that there is none of an empty file."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None


class _Resident:
    """The files with pages in this process's memory."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._files: WeakSet[MappedFile] = WeakSet()
        self._nbytes = 0

    def note(self, file: "MappedFile", count: int) -> None:
        """Count bytes that are about to be read; release what was read before once it is too much."""
        with self._lock:
            self._nbytes += count
            self._files.add(file)
            if self._nbytes <= RESIDENT_BYTES:
                return
            files, self._files, self._nbytes = self._files, WeakSet([file]), count
        for each in files:
            each.drop_pages()


_resident = _Resident()


class MappedFile(io.RawIOBase):
    """A mapped file, to be read. The result of `take` stays valid as long as it is held, also after `close`."""

    def __init__(self, found: mmap.mmap | None) -> None:
        self._map = found
        self._view = memoryview(found or b"")
        self._at = 0

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes, fewer at the end, and no copy of them."""
        taken = self._view[self._at : self._at + count]
        _resident.note(self, len(taken))
        self._at += len(taken)
        return taken

    def drop_pages(self) -> None:
        """Release all pages up to the position, since the kernel brings in more than was asked for. A reader of one
        has it brought in again."""
        stop = self._at - self._at % mmap.PAGESIZE
        if (found := self._map) and stop:
            found.madvise(mmap.MADV_DONTNEED, 0, stop)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        return bytes(self.take(len(self._view) if count is None or count < 0 else count))

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.take(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._at = len(self._view)
        self.drop_pages()
        # Unmapped once the last array over it is gone.
        self._view, self._map = memoryview(b""), None
        super().close()


def taken(file: BinaryIO, count: int) -> bytes | memoryview:
    """Return the next `count` bytes of any file, without a copy if it is mapped."""
    return file.take(count) if isinstance(file, MappedFile) else file.read(count)
