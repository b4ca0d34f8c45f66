"""Room on the disk: nothing new is begun that could fill it, and what fills it all the same is told as such."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import OperationalError

from tessera.shared.problems import StoreFull

RETRY_SECONDS = 30.0

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_POSTGRES_FULL = "53100"


class DiskSpace:
    """What is free where blobs, uploads and the embedded database lie, less a reserve in which what is under way may
    finish."""

    def __init__(self, folders: Sequence[Path], reserve_bytes: int) -> None:
        self._folders = folders
        self._reserve_bytes = reserve_bytes
        self._expected_bytes = 0
        self._lock = threading.Lock()

    def free_bytes(self) -> int:
        """Return what is free on the fullest of the file systems; nothing where a folder has gone."""
        try:
            found = [os.statvfs(folder) for folder in self._folders]
        except FileNotFoundError:
            return 0
        return min(status.f_bavail * status.f_frsize for status in found)

    def has(self, count: int = 0) -> bool:
        """Return whether `count` bytes may come, after all that this process already expects."""
        return self.free_bytes() - self._expected_bytes >= self._reserve_bytes + count

    def require(self, count: int) -> None:
        """Raise StoreFull unless there is room for so many bytes."""
        if not self.has(count):
            raise StoreFull(
                f"{count} bytes and a reserve of {self._reserve_bytes} (setting disk_reserve_bytes) are more than is "
                "free",
                retry_after_seconds=RETRY_SECONDS,
            )

    @contextmanager
    def expecting(self, count: int) -> Iterator[Callable[[int], None]]:
        """Keep room for bytes that are coming; told of those that were written. Raises StoreFull."""
        left = count

        def written(number: int) -> None:
            nonlocal left
            with self._lock:
                left -= number
                self._expected_bytes -= number

        with self._lock:
            self.require(count)
            self._expected_bytes += count
        try:
            yield written
        finally:
            written(left)


def is_full(fault: BaseException) -> bool:
    """Return whether this is what a full disk comes out as, from a file or from the database."""
    if isinstance(fault, OSError):
        return fault.errno in _FULL
    if isinstance(fault, OperationalError):
        # SQLite's text for SQLITE_FULL; PostgreSQL has a code.
        return "disk is full" in str(fault.orig) or getattr(fault.orig, "sqlstate", None) == _POSTGRES_FULL
    return False
