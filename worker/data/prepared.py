"""Files that a worker makes of a data set's own once, and reads again after a restart."""

import mmap
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, TypeVar

from tessera.worker.state.atomic_files import TEMPORARY, written_whole

T = TypeVar("T")

DAMAGED = (ValueError, LookupError)
"""The errors of readers of a damaged file."""


class PreparedFile(mmap.mmap):
    """A mapped file, which another process maps again by its path."""

    path: Path

    def __reduce__(self) -> tuple[Callable[[Path], mmap.mmap], tuple[Path]]:
        return mapped, (self.path,)


def mapped(path: Path) -> mmap.mmap:
    """Return a file mapped, which stays readable when it is removed. Raises OSError, and ValueError if empty."""
    with path.open("rb") as file:
        found = PreparedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
    found.path = path
    return found


@dataclass(frozen=True)
class PreparedFolder:
    """The folder of one data set's files. Without a folder, files are anonymous and end with their last user."""

    folder: Path | None = None
    writable: bool = True
    """True if missing files are written to the folder; if not, they are anonymous too."""

    @property
    def scratch(self) -> Path | None:
        """The folder for temporary files on the same disk; None for the system's."""
        if self.folder is None or not self.writable:
            return None
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.folder

    def file(self, name: str, write: Callable[[BinaryIO], None], read: Callable[[mmap.mmap], T]) -> T:
        """Return the result of `read` for the file of this name, mapped. `write` fills a missing or damaged file.

        Raises OSError, and the exceptions of `write`, after which no file is left.
        """
        if self.folder is not None:
            path = self.folder / name
            with suppress(OSError, *DAMAGED):
                return read(mapped(path))
            if self.scratch:
                with written_whole(path, mode=0o600) as file:
                    write(file)
                return read(mapped(path))
        with TemporaryFile("w+b") as unnamed:
            write(unnamed)
            unnamed.flush()
            return read(mmap.mmap(unnamed.fileno(), 0, access=mmap.ACCESS_READ))

    def clear(self, keep: Callable[[str], bool]) -> None:
        """Remove the files of other names than those to keep, if the folder is writable. Open files stay readable."""
        if self.folder is None or not self.writable or not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not keep(path.name) and path.suffix != TEMPORARY:
                path.unlink(missing_ok=True)


NOT_KEPT = PreparedFolder()
"""For files that nothing uses again."""
