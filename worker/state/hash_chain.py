"""Append-only files of JSON lines, each with the digest of the line before.

With a key, the digests are message authentication codes: without the key, which is stored elsewhere, no line can be
written, changed, removed or inserted unnoticed. A reader with a later digest (`Head`) notices truncation. A crash can
leave half a line at the end; the next entry overwrites it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, NamedTuple, TypeVar, overload

from pydantic import Field, JsonValue, NonNegativeInt, ValidationError

from tessera.shared.api.tasks import Task
from tessera.shared.schema import Frozen
from tessera.worker.state.atomic_files import WriteFailed, sync_names

BEGINNING = "0" * 64
"""The `previous` of the first entry."""

TAIL_BYTES = 1 << 16

PLAIN: Literal[1] = 1
KEYED: Literal[2] = 2
"""The formats of an entry: its digest is a SHA-256, or an HMAC-SHA-256 (RFC 2104) under the site's key."""

ADOPT = "Compare it with a copy; then `tessera worker adopt --config FILE` takes it as it is"


class ChainError(ValueError):
    """A chain is not reliable. The message names the line and the reason."""


class Link(Frozen):
    """An entry of a chain."""

    format: Literal[1, 2] = PLAIN
    seq: NonNegativeInt
    at: datetime
    previous: str
    """The digest of the entry before this one."""
    adopts: str | None = None
    """The SHA-256 of all earlier lines, which a person accepted as they were: they need not be under the key."""
    digest: str = Field(default="", exclude=True)
    """The `previous` of the next entry. The chain fills it in."""


class TaskRef(NamedTuple):
    """The task, and its attempt, that an entry is about, by the names of the entry's fields."""

    run: str
    run_name: str
    round: int
    task: str
    token: int

    @classmethod
    def of(cls, task: Task) -> TaskRef:
        return cls(task.run, task.run_name, task.round, task.id, task.token)


class Head(Frozen):
    """The length and last digest of a chain: it identifies all entries, and reveals nothing without the key."""

    entries: NonNegativeInt
    digest: str


L = TypeVar("L", bound=Link)
Make = Callable[[int, str], L]
"""Builds an entry from its number and the digest of the previous entry."""


class Chain(Generic[L]):
    """A file of entries of one kind, which several processes may append to.

    With a `key`, an entry must be under it, or precede an entry under it that adopts the earlier ones. Without one,
    keyed digests are followed but not verified: for a simulation, and for readers without the key.
    """

    def __init__(
        self, path: Path, kind: type[L], fault: type[ChainError] = ChainError, *, key: bytes | None = None
    ) -> None:
        self._path = path
        self._kind = kind
        self._fault = fault
        self._key = key

    def read(self) -> tuple[L, ...]:
        """Return the entries, oldest first; none if there is no file. Raises ChainError.

        A file from before there was a key can be read, but not appended to.
        """
        return self._content(self._path.read_bytes()).entries if self._path.exists() else ()

    def check(self) -> tuple[L, ...]:
        """Return the entries, oldest first. Raises ChainError if they cannot be read, or not be appended to."""
        if not self._path.exists():
            return ()
        content = self._content(self._path.read_bytes())
        self._require_key(content)
        return content.entries

    @contextmanager
    def held(self) -> Iterator[LockedChain[L]]:
        """Lock the chain against other processes, to read it and append to it. Raises ChainError."""
        with self._locked() as file:
            content = self._content(file.read())
            self._require_key(content)
            file.truncate(content.nbytes)
            file.seek(content.nbytes)
            yield LockedChain(lambda made: self._put(file, made), content.entries)

    def append(self, make: Make[L]) -> L:
        """Append an entry, which is on disk when this returns. Only the previous entry is read.

        Raises ChainError if that entry is not reliable.
        """
        with self._locked() as file:
            last, length = self._last(file)
            entry = make(last.seq + 1, last.digest) if last else make(0, BEGINNING)
            file.truncate(length)
            file.seek(length)
            return self._put(file, entry)

    def adopt(self, make: Callable[[int, str, str], L]) -> L | None:
        """Append an entry that accepts all lines so far. Return None if they are under the key already.

        `make` gets the entry's number, the previous digest, and the SHA-256 of the adopted lines. Raises ChainError
        for lines that do not follow each other.
        """
        with self._locked() as file:
            raw = file.read()
            content = self._content(raw, any_key=True)
            if self._key is None or content.unkeyed_line is None:
                return None
            last = content.entries[-1]
            file.truncate(content.nbytes)
            file.seek(content.nbytes)
            return self._put(file, make(last.seq + 1, last.digest, _sha256(raw[: content.nbytes])))

    def _last(self, file: BinaryIO) -> tuple[L | None, int]:
        """Return the last complete entry, and the file's bytes up to its end."""
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
        parsed = self._parsed(tail[begin + 1 : end + 1])
        if parsed is None or not self._holds(parsed):
            raise self._fault(f"{self._path}: its last line was changed, or written under another key. {ADOPT}")
        if self._key is not None and parsed.entry.format == PLAIN:
            raise self._fault(f"{self._path}: no key protects it yet. {ADOPT}")
        return parsed.entry, start + end + 1

    def _content(self, raw: bytes, *, any_key: bool = False) -> _Content[L]:
        """Return a file's complete entries. With `any_key`, lines may be under another key."""
        nbytes = raw.rfind(b"\n") + 1
        entries: list[L] = []
        previous, place, unkeyed = BEGINNING, 0, None
        for number, line in enumerate(raw[:nbytes].splitlines(keepends=True), start=1):
            parsed = self._parsed(line)
            if parsed is None:
                raise self._fault(f"{self._path}, line {number}: this is no entry of such a file")
            entry = parsed.entry
            holds = self._holds(parsed)
            if not parsed.is_canonical or entry.previous != previous or entry.seq != number - 1:
                raise self._changed(number)
            if entry.format == PLAIN and not holds:
                raise self._changed(number)
            if self._key is not None:
                if not holds or entry.format == PLAIN:
                    unkeyed = unkeyed or number
                elif entry.adopts is not None and entry.adopts == _sha256(raw[:place]):
                    unkeyed = None
            entries.append(entry)
            previous, place = entry.digest, place + len(line)
        content = _Content(tuple(entries), nbytes, unkeyed)
        if unkeyed is not None and not any_key and any(entry.format == KEYED for entry in entries):
            raise self._fault(
                f"{self._path}, line {unkeyed}: this was changed, or is not under this key. Put the key back with "
                f"which it was written, or a copy of the file. {ADOPT}"
            )
        return content

    def _changed(self, number: int) -> ChainError:
        return self._fault(f"{self._path}, line {number}: this was changed, or did not come after the line before it")

    def _require_key(self, content: _Content[L]) -> None:
        if content.unkeyed_line is not None:
            raise self._fault(f"{self._path}: no key protects it yet. {ADOPT}")

    def _parsed(self, line: bytes) -> _Parsed[L] | None:
        try:
            document = json.loads(line)
            raw, digest = document["entry"], document["digest"]
            entry = self._kind.model_validate(raw).model_copy(update={"digest": str(digest)})
        except (ValueError, KeyError, TypeError, ValidationError):
            return None
        return _Parsed(entry, _json(raw), _json(document) + b"\n" == line)

    def _holds(self, parsed: _Parsed[L]) -> bool:
        """Return whether the digest matches the entry. Without a key, accept every keyed digest."""
        entry = parsed.entry
        if entry.format == KEYED and self._key is None:
            return True
        return hmac.compare_digest(entry.digest, self._digest(parsed.raw, entry.format))

    def _digest(self, raw: bytes, format_: int) -> str:
        if format_ == PLAIN or self._key is None:
            return _sha256(raw)
        return hmac.new(self._key, raw, hashlib.sha256).hexdigest()

    def _put(self, file: BinaryIO, made: L) -> L:
        """Write an entry at the file's current position. Raises ChainError if the file was replaced meanwhile."""
        entry = made.model_copy(update={"format": PLAIN if self._key is None else KEYED})
        document: dict[str, JsonValue] = entry.model_dump(mode="json")
        digest = self._digest(_json(document), entry.format)
        line = _json({"entry": document, "digest": digest}) + b"\n"
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
        self._require_in_place(file)
        return entry.model_copy(update={"digest": digest})

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
            sync_names(self._path.parent)
        try:
            # Closing a file with a buffer would write once more what could not be written.
            with self._path.open("r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._require_in_place(file)
                yield file
        except OSError as fault:
            if fault.errno is None or fault.filename is not None:
                raise
            raise WriteFailed(fault.errno, fault.strerror, str(self._path)) from fault

    def _require_in_place(self, file: BinaryIO) -> None:
        """Raise ChainError if the file was removed or replaced: writes to it would be lost."""
        here = os.fstat(file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            raise self._fault(f"{self._path} was removed or replaced while it was held; put back a copy of it")


@dataclass
class LockedChain(Generic[L]):
    """A chain that is locked against other processes. Use `Chain.held`."""

    _put: Callable[[L], L]
    entries: tuple[L, ...]

    def append(self, make: Make[L]) -> L:
        """Append an entry, which is on disk when this returns."""
        entry = self._put(make(len(self.entries), self.entries[-1].digest if self.entries else BEGINNING))
        self.entries = (*self.entries, entry)
        return entry


@dataclass(frozen=True)
class _Parsed(Generic[L]):
    entry: L
    raw: bytes
    """The bytes that its digest covers."""
    is_canonical: bool


@dataclass(frozen=True)
class _Content(Generic[L]):
    entries: tuple[L, ...]
    nbytes: int
    unkeyed_line: int | None
    """The first line that neither the key nor an entry under the key protects."""


@overload
def derived(key: bytes, purpose: str) -> bytes: ...
@overload
def derived(key: None, purpose: str) -> None: ...
@overload
def derived(key: bytes | None, purpose: str) -> bytes | None: ...
def derived(key: bytes | None, purpose: str) -> bytes | None:
    """Return a key for one purpose, so that no line of one file is valid in another."""
    return None if key is None else hmac.new(key, purpose.encode(), hashlib.sha256).digest()


def head_of(entries: tuple[Link, ...]) -> Head | None:
    return Head(entries=len(entries), digest=entries[-1].digest) if entries else None


def missing(entries: tuple[Link, ...], head: Head) -> bool:
    """Return whether the chain does not contain `head`: it is another, or was cut off."""
    return len(entries) < head.entries or entries[head.entries - 1].digest != head.digest


def _json(document: Any) -> bytes:
    """Return the document in canonical form, as `shared.schema.canonical` does."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
