"""Files as memory maps, read without a copy: a reader computes on the page cache itself.

A disk that fails under a page ends the process (SIGBUS) instead of raising OSError. Mapped files were hashed
first, by reading them in the ordinary way, and are never written to again.
"""

import io
import mmap
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from weakref import WeakSet

RESIDENT_BYTES = 8 << 20
"""Bytes of mapped files that stay in this process's memory after they were read, over all files."""
AROUND_BYTES = 1 << 19
"""Bytes that the kernel may bring in around the first that are read."""


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
            nbytes = count if file in self._files else min(count + AROUND_BYTES, file.size)
            self._nbytes += nbytes
            self._files.add(file)
            if self._nbytes <= RESIDENT_BYTES:
                return
            files, self._files, self._nbytes = self._files, WeakSet([file]), nbytes
        for each in files:
            each.release()


_resident = _Resident()


class MappedFile(io.RawIOBase):
    """A file that is mapped while it is read. The result of `take` stays valid as long as it is held, also after
    `close`.

    However many files are open, few are mapped: a map has a file descriptor, and pages that the kernel brought in.
    """

    def __init__(self, open_: Callable[[], mmap.mmap | None]) -> None:
        self._open = open_
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._at = 0
        self._mapped()

    @property
    def size(self) -> int:
        return len(self._mapped())

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes, fewer at the end, and no copy of them."""
        taken = self._mapped()[self._at : self._at + count]
        _resident.note(self, len(taken))
        self._at += len(taken)
        return taken

    def release(self) -> None:
        """Release all pages, and the map once the last array over it is gone, until the next `take`. Any thread may
        call it at any time."""
        found, self._map, self._view = self._map, None, None
        if found:
            # Others may keep the map. A reader of a page has it brought in again.
            found.madvise(mmap.MADV_DONTNEED)

    def _mapped(self) -> memoryview:
        if (view := self._view) is None:
            self._map = found = self._open()
            self._view = view = memoryview(found or b"")
        return view

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        return bytes(self.take(self.size if count is None or count < 0 else count))

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.take(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.release()
        self._open = lambda: None
        super().close()


def taken(file: BinaryIO, count: int) -> bytes | memoryview:
    """Return the next `count` bytes of any file, without a copy if it is mapped."""
    return file.take(count) if isinstance(file, MappedFile) else file.read(count)
