"""Append-only chains of entries, each with the digest of the entry before.

The digests are message authentication codes: without the key, which is stored elsewhere, no entry can be written,
changed, removed or inserted unnoticed. A reader with a later digest (`Head`) notices truncation.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import Field, NonNegativeInt, ValidationError

from tessera.shared.api.tasks import Task
from tessera.shared.schema import Value
from tessera.worker.state.database import StateDatabase, StateError

BEGINNING = "0" * 64
"""The `previous` of the first entry."""

ADOPT = "Compare it with a copy; then `tessera worker adopt --config FILE` takes it as it is"


class ChainError(StateError):
    """A chain is not reliable. The message names the entry and the reason."""


class Link(Value):
    """An entry of a chain."""

    seq: NonNegativeInt
    at: datetime
    previous: str
    """The digest of the entry before this one."""
    adopts: str | None = None
    """The SHA-256 of all earlier entries' lines: a person accepted them as they were, and they need no key."""
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


class Head(Value):
    """The length and last digest of a chain: it identifies all entries, and reveals nothing without the key."""

    entries: NonNegativeInt
    digest: str


L = TypeVar("L", bound=Link)
Make = Callable[[int, str], L]
"""Builds an entry from its number and the digest of the previous entry."""


class Chain(Generic[L]):
    """A chain of entries of one kind in a database, which several processes may append to.

    Each entry must be under the `key` (HMAC-SHA-256, RFC 2104), or precede an entry under it that adopts the earlier
    ones. A simulation has an empty key.
    """

    def __init__(
        self,
        database: StateDatabase,
        name: str,
        kind: type[L],
        fault: type[ChainError] = ChainError,
        *,
        key: bytes = b"",
    ) -> None:
        self._database = database
        self.name = name
        self._kind = kind
        self._fault = fault
        self._key = derived(key, name)

    def read(self) -> tuple[L, ...]:
        """Return the entries, oldest first. Raises ChainError if they are not reliable, and OSError."""
        return self._verified(self._rows()).entries

    def lines(self) -> list[bytes]:
        """Return the entries as lines of a file, without verifying them: each with its digest, in canonical JSON."""
        return [line_of(raw, digest) for raw, digest in self._rows()]

    def read_lines(self, lines: Iterable[bytes], where: str) -> tuple[L, ...]:
        """Return the entries in lines that `lines` returned, from the file `where`. Raises ChainError as `read`."""
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                document = json.loads(line)
                rows.append((_json(document["entry"]).decode(), str(document["digest"])))
            except (ValueError, KeyError, TypeError) as fault:
                raise self._fault(f"{where}, entry {number}: this is no entry of such a chain") from fault
        return self._verified(rows, where=where).entries

    def head(self) -> Head | None:
        """Return the length and the last digest, without verifying them; None for an empty chain."""
        last = self._database.row(
            "SELECT seq + 1, digest FROM entries WHERE chain = ? ORDER BY seq DESC LIMIT 1", self.name
        )
        return Head(entries=last[0], digest=last[1]) if last else None

    def has(self, digest: str) -> bool:
        """Return True if an entry has or contains this digest."""
        query = "SELECT 1 FROM entries WHERE chain = ? AND (digest = ? OR instr(entry, ?)) LIMIT 1"
        return self._database.row(query, self.name, digest, digest) is not None

    @contextmanager
    def held(self) -> Iterator[LockedChain[L]]:
        """Exclude other processes, to read the chain and append to it. Entries are on disk when the block has ended.

        Raises ChainError.
        """
        with self._database.writing():
            yield LockedChain(self._put, self.read())

    def append(self, make: Make[L]) -> L:
        """Append an entry, which is on disk when this returns. Only the previous entry is read.

        Raises ChainError if that entry is not reliable.
        """
        with self._database.writing():
            last = self._database.row(
                "SELECT entry, digest FROM entries WHERE chain = ? ORDER BY seq DESC LIMIT 1", self.name
            )
            if last is None:
                return self._put(make(0, BEGINNING))
            entry = self._parsed(*last)
            if entry is None or not self._holds(entry, last[0]):
                raise self._fault(f"{self.where}: its last entry was changed, or written under another key. {ADOPT}")
            return self._put(make(entry.seq + 1, entry.digest))

    def adopt(self, make: Callable[[int, str, str], L]) -> L | None:
        """Append an entry that accepts all entries so far. Return None if they are under the key already.

        `make` gets the entry's number, the previous digest, and the SHA-256 of the adopted lines. Raises ChainError
        for entries that do not follow each other.
        """
        with self._database.writing():
            rows = self._rows()
            found = self._verified(rows, any_key=True)
            if found.unkeyed is None:
                return None
            last = found.entries[-1]
            adopted = hashlib.sha256(b"".join(line_of(*row) for row in rows)).hexdigest()
            return self._put(make(last.seq + 1, last.digest, adopted))

    @property
    def where(self) -> str:
        """The database and the name of the chain, for messages."""
        return f"{self._database.path}, {self.name}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = self._database.rows("SELECT entry, digest FROM entries WHERE chain = ? ORDER BY seq", self.name)
        return [(entry, digest) for entry, digest in rows]

    def _verified(self, rows: Iterable[tuple[str, str]], *, where: str = "", any_key: bool = False) -> _Content[L]:
        """Return the entries in rows. With `any_key`, they may be under another key."""
        entries: list[L] = []
        previous, unkeyed, lines, where = BEGINNING, None, hashlib.sha256(), where or self.where
        for number, (raw, digest) in enumerate(rows, start=1):
            entry = self._parsed(raw, digest)
            if entry is None:
                raise self._fault(f"{where}, entry {number}: this is no entry of such a chain")
            if entry.previous != previous or entry.seq != number - 1:
                raise self._fault(
                    f"{where}, entry {number}: this was changed, or did not come after the entry before it"
                )
            if not self._holds(entry, raw):
                unkeyed = unkeyed or number
            elif entry.adopts is not None and entry.adopts == lines.hexdigest():
                unkeyed = None
            entries.append(entry)
            previous = entry.digest
            lines.update(line_of(raw, digest))
        if unkeyed is not None and not any_key:
            raise self._fault(
                f"{where}, entry {unkeyed}: this was changed, or is not under this key. Put the key back with "
                f"which it was written, or a copy of the file. {ADOPT}"
            )
        return _Content(tuple(entries), unkeyed)

    def _parsed(self, raw: Any, digest: Any) -> L | None:
        if not (isinstance(raw, str) and isinstance(digest, str) and digest.isascii()):
            # SQLite stores a value of any type in a column for texts.
            return None
        try:
            return self._kind.model_validate_json(raw).model_copy(update={"digest": digest})
        except ValidationError:
            return None

    def _holds(self, entry: L, raw: str) -> bool:
        """Return True if the entry is under the key."""
        return hmac.compare_digest(entry.digest, self._digest(raw.encode()))

    def _digest(self, raw: bytes) -> str:
        return hmac.new(self._key, raw, hashlib.sha256).hexdigest()

    def _put(self, entry: L) -> L:
        raw = _json(entry.model_dump(mode="json"))
        digest = self._digest(raw)
        self._database.write(
            "INSERT INTO entries (chain, seq, digest, entry) VALUES (?, ?, ?, ?)",
            self.name, entry.seq, digest, raw.decode(),
        )  # fmt: skip
        return entry.model_copy(update={"digest": digest})


@dataclass
class LockedChain(Generic[L]):
    """A chain that is locked against other processes. Use `Chain.held`."""

    _put: Callable[[L], L]
    entries: tuple[L, ...]

    def append(self, make: Make[L]) -> L:
        """Append an entry, which is on disk when the block of `held` has ended."""
        entry = self._put(make(len(self.entries), self.entries[-1].digest if self.entries else BEGINNING))
        self.entries = (*self.entries, entry)
        return entry


@dataclass(frozen=True)
class _Content(Generic[L]):
    entries: tuple[L, ...]
    unkeyed: int | None
    """The number of the first entry that neither the key nor an entry under it protects."""


def derived(key: bytes, purpose: str) -> bytes:
    """Return a key for one purpose, so that no entry of one chain is valid in another."""
    return hmac.new(key, purpose.encode(), hashlib.sha256).digest()


def head_of(entries: tuple[Link, ...]) -> Head | None:
    return Head(entries=len(entries), digest=entries[-1].digest) if entries else None


def missing(entries: tuple[Link, ...], head: Head) -> bool:
    """Return True if the chain does not contain `head`: it is another, or was cut off."""
    return len(entries) < head.entries or entries[head.entries - 1].digest != head.digest


def line_of(raw: str, digest: str) -> bytes:
    """Return an entry's line in a file of a chain."""
    return b'{"digest":"%s","entry":%s}\n' % (digest.encode(), raw.encode())


def _json(document: Any) -> bytes:
    """Return the document in canonical form, as `shared.schema.canonical` does."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
