"""What a process has not finished writing: in a folder of its own, which others clear away once it is gone.

Several processes, on several machines, may share one staging folder. Who is gone is told by a lock in its folder,
which the kernel, or the file server, takes back however the process ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import uuid
import weakref
from contextlib import suppress
from pathlib import Path

OWN = "put-"
LOCK = "lock"


class StagingArea:
    """The files of one process in the staging folder."""

    def __init__(self, staging_dir: Path) -> None:
        self._staging_dir = staging_dir
        self._moving = threading.Lock()
        self._own: Path | None = None

    def path(self) -> Path:
        """Return where to write a file that nobody else knows of yet."""
        with self._moving:
            while self._own is None or not self._own.is_dir():
                self._own = self._moved_in()
            return self._own / uuid.uuid4().hex

    def _moved_in(self) -> Path | None:
        """Return a folder under this process's lock, or None if somebody has swept before it was locked."""
        own = self._staging_dir / f"{OWN}{uuid.uuid4().hex}"
        own.mkdir()
        descriptor = _locked(own, os.O_CREAT)
        if descriptor is None:
            return None
        self._moving_out = weakref.finalize(self, _moved_out, own, descriptor)
        return own

    def abandon(self) -> None:
        """Let go of the lock and leave the files behind, as the end of a killed process does."""
        if self._own and (left := self._moving_out.detach()):
            _, _, (_, descriptor), _ = left
            os.close(descriptor)


def sweep(staging_dir: Path) -> int:
    """Remove what processes that are gone left half-written, and returns how many files there were."""
    swept = 0
    for folder in staging_dir.glob(f"{OWN}*"):
        descriptor = _locked(folder)
        if descriptor is not None:
            swept += sum(1 for path in folder.iterdir() if path.name != LOCK)
            _moved_out(folder, descriptor)
    return swept


def _locked(folder: Path, create: int = 0) -> int | None:
    """Return a descriptor that holds the folder's lock until it is closed; None if another does, or the folder is
    gone."""
    try:
        # For writing, without which network file systems lock nothing.
        descriptor = os.open(folder / LOCK, os.O_RDWR | create)
    except FileNotFoundError:
        # Nobody's yet: whoever has made it makes another.
        with suppress(OSError):
            folder.rmdir()
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if not folder.exists():
        os.close(descriptor)
        return None
    return descriptor


def _moved_out(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
