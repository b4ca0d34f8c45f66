"""Atomic file writes: temporary name, fsync, rename, fsync of the folder."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO
from uuid import uuid4

KEY_BYTES = 32

TEMPORARY = ".tmp"
"""Suffix of files that are not complete yet."""

WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Errors of writes alone: a worker writes to no folder but its own."""

ACCESS = {errno.EIO, errno.ESTALE, errno.EPERM, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOLCK}
"""Errors of other files too, such as those of a data set."""


class WriteFailed(OSError):
    """An error in writing a file, which it names, with the number of bytes that the file had by then."""

    written_bytes = 0


def disk_error(error: BaseException) -> OSError | None:
    """Return the error of a full, failing or read-only disk that this is, or that caused it; None for others."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause if isinstance(cause, OSError) and cause.errno in WRITES | ACCESS else None


@contextmanager
def written_whole(path: Path, *, durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file to write and read. It is renamed to `path` if the block succeeds, and deleted otherwise.

    If `durable`, it then survives a power cut too, and not only the death of the process.
    """
    with temporary_file(path.parent, mode) as (temporary, file):
        yield file
        file.flush()
        if durable:
            os.fsync(file.fileno())
        replace(temporary, path, durable=durable)


def write_secret(path: Path, secret: str) -> None:
    """Write a file that only its owner can read from the moment it exists, replacing an existing one."""
    with written_whole(path, mode=0o600) as file:
        file.write(f"{secret}\n".encode("ascii"))


def secret_key(path: Path) -> bytes:
    """Return the key in a file that only its owner can read. Create it at random if the file does not exist.

    Processes that create it at the same time get the same key. Raises OSError, and ValueError for an invalid key.
    """
    if not path.exists():
        with temporary_file(path.parent, 0o600) as (temporary, file):
            file.write(f"{token_hex(KEY_BYTES)}\n".encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(temporary, path)
        sync_names(path.parent)
    key = bytes.fromhex(path.read_text(encoding="ascii"))
    if len(key) != KEY_BYTES:
        raise ValueError(f"it has {len(key)} bytes in place of {KEY_BYTES}")
    return key


@contextmanager
def temporary_file(folder: Path, mode: int = 0o666) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file with a temporary name to write and read. Delete it at the end unless it was renamed."""
    path = folder / (uuid4().hex + TEMPORARY)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags, mode)
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield path, file
    except OSError as fault:
        if fault.errno is None or fault.filename is not None:
            raise
        failed = WriteFailed(fault.errno, fault.strerror, str(path))
        failed.written_bytes = path.stat().st_size
        raise failed from fault
    finally:
        path.unlink(missing_ok=True)


def replace(old: Path, new: Path, *, durable: bool = True) -> None:
    """Rename a file over another in the same folder. If `durable`, the rename survives a power cut on return."""
    old.replace(new)
    if durable:
        sync_names(new.parent)


def sync_names(path: Path) -> None:
    """Sync a folder, so that its file names survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes. Raises BlockingIOError if it is locked."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextmanager
def alone_or(refuse: Callable[[str], Exception], folder: Path) -> Iterator[None]:
    """Lock a folder as `alone` does. Raises what `refuse` makes of the reason if that fails."""
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(folder))
        except BlockingIOError as fault:
            raise refuse(f"another process is using {folder}") from fault
        except OSError as fault:
            raise refuse(f"{folder} cannot be used: {fault.strerror}") from fault
        yield


def sweep(folder: Path) -> None:
    """Remove the incomplete files that a killed process left, at any depth, and their journals."""
    for left in folder.rglob(f"*{TEMPORARY}*"):
        left.unlink(missing_ok=True)
