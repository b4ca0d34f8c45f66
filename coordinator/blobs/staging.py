"""Unfinished files of each process, in a folder of its own that other processes remove after its end.

Several processes on several machines may share one staging folder. Each holds a lock in its own, which the kernel or
the file server releases however the process ends.
"""

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
        self._creating = threading.Lock()
        self._own: Path | None = None

    def path(self) -> Path:
        """Return a new path to write to."""
        with self._creating:
            while self._own is None or not self._own.is_dir():
                self._own = self._create()
            return self._own / uuid.uuid4().hex

    def _create(self) -> Path | None:
        """Create a folder and lock it; return None if another process swept it before it was locked."""
        own = self._staging_dir / f"{OWN}{uuid.uuid4().hex}"
        own.mkdir()
        descriptor = lock(own, os.O_CREAT)
        if descriptor is None:
            return None
        self._finalizer = weakref.finalize(self, _remove, own, descriptor)
        return own

    def abandon(self) -> None:
        """Release the lock and leave the files behind, as a killed process does."""
        if self._own and (detached := self._finalizer.detach()):
            _, _, (_, descriptor), _ = detached
            os.close(descriptor)


def sweep(staging_dir: Path) -> int:
    """Remove the files of ended processes; return their number."""
    swept = 0
    for folder in staging_dir.glob(f"{OWN}*"):
        descriptor = lock(folder)
        if descriptor is not None:
            swept += sum(1 for path in folder.iterdir() if path.name != LOCK)
            _remove(folder, descriptor)
    return swept


def lock(folder: Path, create: int = 0) -> int | None:
    """Return a descriptor that holds the folder's lock until it is closed; None if it is taken or the folder gone."""
    try:
        # For writing: network file systems require that for an exclusive lock.
        descriptor = os.open(folder / LOCK, os.O_RDWR | create)
    except FileNotFoundError:
        # Not locked yet: the process that created it creates another.
        with suppress(OSError):
            folder.rmdir()
        return None
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
