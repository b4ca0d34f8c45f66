"""Append-only files of JSON lines, each of which names the digest of the one before.

So a line that was changed, taken out of the middle or put in between is noticed. What was cut off at the end is not:
keep the last digest elsewhere. A crash can leave half a line at the end, and the next entry takes its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic import JsonValue, NonNegativeInt, ValidationError

from shared.blocks import Frozen
from shared.wire import canonical

BEGINNING = "0" * 64
"""The digest that the first entry names as the one before it."""

TAIL_BYTES = 1 << 16


class ChainError(ValueError):
    """A chain cannot be relied on; says which line and why."""


class Link(Frozen):
    """An entry of a chain."""

    seq: NonNegativeInt
    at: datetime
    previous: str
    """The digest of the entry before this one."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(canonical(self)).hexdigest()

    def line(self) -> bytes:
        return canonical(_Line(entry=self.model_dump(mode="json"), digest=self.digest)) + b"\n"


L = TypeVar("L", bound=Link)
Make = Callable[[int, str], L]
"""Makes an entry of its number and the digest of the one before it."""


class _Line(Frozen):
    entry: dict[str, JsonValue]
    digest: str


class Chain(Generic[L]):
    """A file of entries of one kind, which several processes may add to."""

    def __init__(self, path: Path, kind: type[L], fault: type[ChainError] = ChainError) -> None:
        self._path = path
        self._kind = kind
        self._fault = fault

    def read(self) -> tuple[L, ...]:
        """The entries, oldest first; none if there is no file. Raises ChainError."""
        return self._entries(self._path.read_bytes())[0] if self._path.exists() else ()

    @contextmanager
    def held(self) -> Iterator[Held[L]]:
        """The entries, to judge and add to while no other process can. Raises ChainError."""
        with self._locked() as file:
            entries, length = self._entries(file.read())
            file.truncate(length)
            file.seek(length)
            yield Held(file, entries)

    def append(self, make: Make[L]) -> L:
        """Adds an entry, which is on disk when this returns. Only the one before it is read, however long the file.

        Raises ChainError if that cannot be relied on.
        """
        with self._locked() as file:
            last, length = self._last(file)
            entry = make(last.seq + 1, last.digest) if last else make(0, BEGINNING)
            file.truncate(length)
            file.seek(length)
            _put(file, entry)
        return entry

    def _last(self, file: BinaryIO) -> tuple[L | None, int]:
        """The last whole entry, and how many bytes there are up to its end."""
        size = file.seek(0, os.SEEK_END)
        tail_bytes = TAIL_BYTES
        while True:
            start = max(0, size - tail_bytes)
            file.seek(start)
            tail = file.read()
            end = tail.rfind(b"\n")
            begin = tail.rfind(b"\n", 0, max(end, 0))
            if start == 0 or begin >= 0:
                break
            tail_bytes *= 2
        if end < 0:
            return None, 0
        line = tail[begin + 1 : end + 1]
        entry = self._parsed(line)
        if entry is None or entry.line() != line:
            raise self._fault(f"{self._path}: its last line was changed")
        return entry, start + end + 1

    def _entries(self, content: bytes) -> tuple[tuple[L, ...], int]:
        """The entries of a file, and how many bytes they take: what follows is half a line."""
        length = content.rfind(b"\n") + 1
        entries: list[L] = []
        previous = BEGINNING
        for number, line in enumerate(content[:length].splitlines(keepends=True), start=1):
            entry = self._parsed(line)
            if entry is None:
                raise self._fault(f"{self._path}, line {number}: this is no entry of such a file")
            if entry.line() != line or entry.previous != previous or entry.seq != number - 1:
                raise self._fault(
                    f"{self._path}, line {number}: this was changed, or did not come after the line before it"
                )
            entries.append(entry)
            previous = entry.digest
        return tuple(entries), length

    def _parsed(self, line: bytes) -> L | None:
        try:
            return self._kind.model_validate(json.loads(line)["entry"])
        except (ValueError, KeyError, TypeError, ValidationError):
            return None

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        self._create()
        with self._path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _create(self) -> None:
        if self._path.exists():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.touch(mode=0o600)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Held(Generic[L]):
    """A chain that nobody else adds to meanwhile."""

    def __init__(self, file: BinaryIO, entries: tuple[L, ...]) -> None:
        self._file = file
        self.entries = entries

    def append(self, make: Make[L]) -> L:
        """Adds an entry, which is on disk when this returns."""
        entry = make(len(self.entries), self.entries[-1].digest if self.entries else BEGINNING)
        _put(self._file, entry)
        self.entries = (*self.entries, entry)
        return entry


def _put(file: BinaryIO, entry: Link) -> None:
    file.write(entry.line())
    file.flush()
    os.fsync(file.fileno())
