"""The worker's own folders when nothing can be written there: a full, failing or read-only disk, or no files left."""

import errno
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from tessera.shared.units import size
from tessera.worker.state.atomic_files import WRITES, WriteFailed, disk_error, temporary_file

DISK_FULL = "disk-full"
"""The code of such a failure, for logs and for the coordinator."""

PROBE_BYTES = 1 << 20


def is_of_disk(error: BaseException) -> bool:
    """Return True if an error at a worker's start is of its disk, and not of its settings."""
    cause = disk_error(error)
    return cause is not None and cause.errno not in (errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class _Fault:
    folder: Path
    file: Path | None
    needed_bytes: int
    reason: str

    def in_words(self) -> str:
        return unwritable(self.folder, self.reason, self.needed_bytes)


def unwritable(folder: Path, reason: str, needed_bytes: int) -> str:
    """Return in words that a folder cannot be written to, with the bytes that are needed and free."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return f"{folder}: {reason}; {size(needed_bytes)} are needed, {size(free)} are free"


class Disk:
    """The worker's own folders, of which the first is its state folder, and whether they can be written to."""

    def __init__(self, folders: Collection[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._fault: _Fault | None = None

    def note(self, error: BaseException) -> str | None:
        """Remember an error of the worker's own folders, and return it in words. Return None for another error."""
        cause = disk_error(error) if isinstance(error, OSError) else None
        if cause is None:
            return None
        file = Path(os.fsdecode(cause.filename)).resolve() if isinstance(cause.filename, str | bytes) else None
        folder = next((own for own in self._folders if file is None or file.is_relative_to(own)), None)
        if folder is None:
            if file is None or cause.errno not in WRITES:
                return None
            folder = file.parent
        written = cause.written_bytes if isinstance(cause, WriteFailed) else 0
        before = self._fault
        self._fault = _Fault(folder, file, written + PROBE_BYTES, cause.strerror or type(cause).__name__)
        words = self._fault.in_words()
        if before != self._fault:
            remedy = f"Make {folder} writable: nothing is claimed until a write works. A restart is not needed."
            structlog.get_logger("worker").error(DISK_FULL, path=str(folder), detail=words, remedy=remedy)
        return words

    def full(self) -> str | None:
        """Return the reason why nothing can be written, or None. After an error, try again."""
        if (fault := self._fault) is None:
            return None
        try:
            if shutil.disk_usage(fault.folder).free >= fault.needed_bytes:
                if fault.file and fault.file.is_file() and not os.access(fault.file, os.W_OK):
                    # One that may only be read, in a folder that takes others.
                    return fault.in_words()
                with temporary_file(fault.folder) as (_, file):
                    file.write(os.urandom(PROBE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                self._fault = None
                return None
        except OSError:
            pass
        return fault.in_words()
