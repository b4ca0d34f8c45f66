"""Free disk space: work that could fill the disk does not start, and a full disk is reported as such."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy.exc import OperationalError

from tessera.shared.problems import StoreFull

RETRY_SECONDS = 30.0

STEP_BYTES = 4 << 20
"""Space reserved for an upload in progress, however long it is: a sender that stops keeps no more from others."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNUSABLE = {errno.EMFILE, errno.ENFILE, errno.EPERM, errno.EACCES, errno.EROFS, errno.EIO}
MIN_FILES = 100
"""Files that must still fit into a file system; one may have no inode left, but space."""
_POSTGRES_FULL = "53100"


class DiskSpace:
    """Free space in the folders of blobs, uploads and the embedded database, less a reserve for work in progress."""

    def __init__(self, folders: Sequence[Path], reserve_bytes: int) -> None:
        self._folders = folders
        self._reserve_bytes = reserve_bytes
        self._expected_bytes = 0
        self._lock = threading.Lock()

    def free_bytes(self) -> int:
        """Return the free bytes of the fullest file system; 0 if a folder is missing."""
        try:
            statuses = [os.statvfs(folder) for folder in self._folders]
        except FileNotFoundError:
            return 0
        return min(status.f_bavail * status.f_frsize for status in statuses)

    def has(self, count: int = 0) -> bool:
        """Return True if there is space for `count` bytes more than this process already expects, and for files."""
        return self.shortage(count) is None

    def shortage(self, count: int = 0) -> str | None:
        """Return the shortage for `count` bytes more in words, or None if there is space."""
        if self.free_bytes() - self._expected_bytes < self._reserve_bytes + count:
            more = f"{count} bytes and " if count else ""
            return (
                f"{more}the reserve of {self._reserve_bytes} bytes (setting disk_reserve_bytes) exceed the free space"
            )
        for folder in self._folders:
            # A folder that is gone takes no writes, which is another fault.
            with suppress(OSError):
                disk = os.statvfs(folder)
                # Some file systems have no limit of files, and say 0.
                if disk.f_files and disk.f_favail < MIN_FILES:
                    return f"the file system of {folder} has room for {disk.f_favail} more files (inodes) only"
        return None

    def require(self, count: int) -> None:
        """Raise StoreFull unless there is space for `count` bytes."""
        if shortage := self.shortage(count):
            raise StoreFull(shortage, retry_after_seconds=RETRY_SECONDS)

    @contextmanager
    def expecting(self, count: int) -> Iterator[Callable[[int], None]]:
        """Reserve space for the next of `count` bytes to come; yield a function that reports written ones, and
        raises StoreFull, as this does, if there is no space for the next step."""
        step, left, checked = min(count, STEP_BYTES), count, count

        def written(number: int) -> None:
            nonlocal left, checked
            left -= number
            if left and checked - left >= step:
                # The step is still reserved, so that this is the space for the next one.
                self.require(0)
                checked = left

        with self._lock:
            self.require(step)
            self._expected_bytes += step
        try:
            yield written
        finally:
            with self._lock:
                self._expected_bytes -= step


def is_unusable(fault: BaseException) -> bool:
    """Return True if a file's error is one of this machine, which no request and no run caused: it passes, or a
    person repairs it."""
    return isinstance(fault, OSError) and fault.errno in _UNUSABLE


def is_full(fault: BaseException) -> bool:
    """Return True if a file's or the database's error means that the disk is full."""
    if isinstance(fault, OSError):
        return fault.errno in _FULL
    if isinstance(fault, OperationalError):
        # SQLite's text for SQLITE_FULL; PostgreSQL has a code.
        return "disk is full" in str(fault.orig) or getattr(fault.orig, "sqlstate", None) == _POSTGRES_FULL
    return False
