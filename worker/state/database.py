"""The database of a worker's state: one SQLite file in a folder, which several processes may use.

A transaction is on disk when it ends. Large content stays in files: a row that names a file is committed after the
file is safe on disk.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import ValidationError

from tessera.shared.schema import Value
from tessera.worker.state.atomic_files import WriteFailed, sync_names, temporary_file

DATABASE_FILE = "state.db"

FORMAT = 1
"""The `user_version` of a database with this schema."""

SCHEMA = """
-- Hash chains (`hash_chain`). `entry` is the canonical JSON that `digest` covers.
CREATE TABLE entries (
    chain TEXT NOT NULL, seq INTEGER NOT NULL, digest TEXT NOT NULL, entry TEXT NOT NULL, PRIMARY KEY (chain, seq)
) WITHOUT ROWID;
CREATE TABLE runs (run TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
-- Updates that left into exact secure sums, by the digest of the model's values.
CREATE TABLE sums (
    model TEXT NOT NULL, terms TEXT NOT NULL, contribution TEXT NOT NULL, PRIMARY KEY (model, terms)
) WITHOUT ROWID;
CREATE TABLE evaluations (dataset TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
-- The last answers of each kind about a data set, and digests of the subjects that they are of (`described_data`).
CREATE TABLE descriptions (
    dataset TEXT PRIMARY KEY, times INTEGER NOT NULL, digests BLOB NOT NULL, description TEXT NOT NULL
);
-- Requests for a person's approval.
CREATE TABLE requests (
    run TEXT NOT NULL, terms TEXT NOT NULL, request TEXT NOT NULL, PRIMARY KEY (run, terms)
) WITHOUT ROWID;
-- External bases that were added (`base_cache`).
CREATE TABLE bases (source TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
-- Updates that wait for a person's release. Their files lie in `airlock/`.
CREATE TABLE held (
    id TEXT PRIMARY KEY, summary TEXT NOT NULL, task TEXT NOT NULL, decision TEXT
) WITHOUT ROWID;
-- Single values.
CREATE TABLE notes (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
"""

FORMER_FILES = (
    "ledger/*.jsonl", "audit/*.jsonl", "runs/*.json", "inbox/*.json", "*.jsonl", f"{'[0-9a-f]' * 32}*.json",
    "sums/*.json", "measured/*.json", "client_privacy.json",
)  # fmt: skip
"""Files of state folders, and of folders that workers share, from before there was a database."""

JOURNALS = ("-wal", "-journal")
"""The ends of the names of the files with transactions that the database may lack."""

NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fakeowner", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs",
}  # fmt: skip
"""Types of file systems on which other machines may use a file, and WAL does not work between them. Also `fuse.*`."""

WAIT_SECONDS = 60.0
"""Time to wait for another process's transaction."""

ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.ENOLCK,
    sqlite3.SQLITE_PROTOCOL: errno.ENOLCK,
}
"""The errors of the disk, by SQLite's primary result codes."""

DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_ERROR}
"""The codes of a damaged file. The last is that of a missing table; a text that is not UTF-8 has no code."""

M = TypeVar("M", bound=Value)
Row = tuple[Any, ...]


class StateError(ValueError):
    """A worker's state is damaged, of another format, or not reliable. The message has the remedy."""


class StateDatabase:
    """The database of one folder. Use `StateDatabase.of`: with one connection in a process, a write within another
    store's transaction joins it, where a second connection would wait for the first."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.path = folder / DATABASE_FILE
        self._durable = durable
        self._lock = RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._writes = False
        self._is_inherited = False
        """True in a forked process if another thread used the connection at that time."""

    def __del__(self) -> None:
        if self._connection:
            self._connection.close()

    @classmethod
    def of(cls, folder: Path, *, durable: bool = True) -> StateDatabase:
        """Return the folder's database, which is created by the first write.

        Unless it is `durable`, it survives the death of the process but no power cut: for a simulation.
        """
        folder = folder.resolve()
        with _LOCK:
            return _DATABASES.get(folder) or _DATABASES.setdefault(folder, cls(folder, durable=durable))

    def rows(self, query: str, *values: object) -> list[Row]:
        """Return the rows of a query; none if there is no database. Raises StateError, OSError."""
        with self._lock, self._translated():
            if self._writes and self._connection:
                # Even if the file has another inode now: the transaction's end finds that.
                return self._connection.execute(query, values).fetchall()
            if not self.path.exists():
                self._refuse_remains()
                return []
            return self._open().execute(query, values).fetchall()

    def row(self, query: str, *values: object) -> Row | None:
        return next(iter(self.rows(query, *values)), None)

    def document(self, kind: type[M], query: str, *values: object) -> M | None:
        """Return the document in the first column of the first row, or None. Raises StateError, OSError."""
        return next(iter(self.documents(kind, query, *values)), None)

    def documents(self, kind: type[M], query: str, *values: object) -> list[M]:
        """Return the documents in the first column of each row. Raises StateError, OSError."""
        try:
            return [kind.model_validate_json(row[0]) for row in self.rows(query, *values)]
        except ValidationError as fault:
            raise StateError(f"{self.path}: a row was changed, and is no {kind.__name__}. {self.remedy}") from fault

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction. It excludes other writers, and is on disk when the block has ended.

        Within another one, join it. Raises StateError, OSError.
        """
        with self._lock, self._translated():
            if self._writes and self._connection:
                yield self._connection
                return
            connection = self._open()
            self._writes = True
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                self._writes = False
            if self._inode != _inode(self.path):
                raise StateError(f"{self.path} was removed or replaced while it was in use; put back a copy of it")

    def write(self, statement: str, *values: object) -> None:
        """Execute one statement in a transaction. Raises StateError, OSError."""
        with self.writing() as connection:
            connection.execute(statement, values)

    def note(self, name: str) -> Any:
        """Return the value of a note, or None. Raises StateError, OSError."""
        row = self.row("SELECT value FROM notes WHERE name = ?", name)
        return row[0] if row else None

    def set_note(self, name: str, value: object) -> None:
        """Write a note, or remove it if the value is None. Raises StateError, OSError."""
        if value is None:
            self.write("DELETE FROM notes WHERE name = ?", name)
        else:
            self.write("INSERT OR REPLACE INTO notes VALUES (?, ?)", name, value)

    def check(self) -> str:
        """Verify the whole file, and return its journal mode. Raises StateError, OSError."""
        faults = [fault for (fault,) in self.rows("PRAGMA quick_check") if fault != "ok"]
        if faults:
            raise StateError(f"{self.path} is damaged: {faults[0].splitlines()[-1]}. {self.remedy}")
        return "".join(mode for (mode,) in self.rows("PRAGMA journal_mode"))

    @property
    def remedy(self) -> str:
        journals = ", ".join(f"{DATABASE_FILE}{end}" for end in ("-shm", *JOURNALS))
        return (
            f"Stop the worker, remove {self.path} and its journals ({journals}), and put back the newest copy of the "
            "file. Without a copy, the coordinator names what is missing, and `tessera worker adopt --config FILE` "
            "charges for it"
        )

    def _open(self) -> sqlite3.Connection:
        """Return the connection to the file that is at the path now, created if missing."""
        inode = _inode(self.path)
        if self._connection and self._inode == inode:
            return self._connection
        self._close()
        if self._is_inherited:
            raise StateError(
                f"{self.path} was in use when this process was forked: start a process of its own instead"
            )
        if inode is None:
            self._create()
        if not all(os.access(path, os.R_OK | os.W_OK) for path in (self.path, self.path.parent)):
            reason = f"{os.strerror(errno.EACCES)} to write it and its folder, as reading takes too (use a copy)"
            raise PermissionError(errno.EACCES, reason, str(self.path))
        with ExitStack() as opened:
            connection = opened.enter_context(
                closing(
                    sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
                )
            )
            mode = self._mode
            (found,) = connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()
            if found.upper() != mode:
                raise StateError(f"{self.path}: its file system does not take the journal mode {mode}; use another")
            # Without WAL, a commit is on disk once the journal's removal is.
            synchronous = "OFF" if not self._durable else "FULL" if mode == "WAL" else "EXTRA"
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if not version:
                raise StateError(f"{self.path} is damaged: it is not a worker's database. {self.remedy}")
            if version != FORMAT:
                raise StateError(
                    f"{self.path} has the format {version}, and this version of Tessera uses {FORMAT}: start the "
                    "version that wrote it, or name another folder"
                )
            opened.pop_all()
        self._connection, self._inode = connection, _inode(self.path)
        return connection

    @property
    def _mode(self) -> str:
        return "DELETE" if is_on_network(self.path) else "WAL"

    def _create(self) -> None:
        """Create the file whole: a process that is killed meanwhile leaves none."""
        self._refuse_remains()
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary_file(folder, 0o600) as (temporary, file):
            with closing(sqlite3.connect(temporary)) as connection:
                # No other process sees the file before it is whole.
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute(f"PRAGMA journal_mode = {self._mode}")
                connection.executescript(f"BEGIN; {SCHEMA}; PRAGMA user_version = {FORMAT}; COMMIT")
            if self._durable:
                os.fsync(file.fileno())
            # Another process may have created it meanwhile.
            with suppress(FileExistsError):
                os.link(temporary, self.path)
        if self._durable:
            sync_names(folder)

    def _refuse_remains(self) -> None:
        """Raise StateError for a folder without a database, and with files of an earlier format or the journal of a
        removed database: spending in them would not count, or enter a new database."""
        for journal in (self.path.with_name(f"{DATABASE_FILE}{end}") for end in JOURNALS):
            # Another process that creates them creates the database first.
            if journal.exists() and not self.path.exists():
                raise StateError(f"{journal} is left of a database that is gone. {self.remedy}")
        for former in (found for pattern in FORMER_FILES for found in self.path.parent.glob(pattern)):
            raise StateError(
                f"{former} is of an earlier format, which this version of Tessera does not read: its privacy and "
                f"history would count as nothing. Use the version that wrote it, or another folder than "
                f"{self.path.parent} if no data were used under it"
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise OSError for SQLite's errors of the disk, and StateError for a damaged file."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as fault:
            code = getattr(fault, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in DAMAGED:
                raise StateError(f"{self.path} is damaged: {fault}. {self.remedy}") from fault
            if code not in ERRNOS:
                raise
            reason = os.strerror(ERRNOS[code])
            if code == sqlite3.SQLITE_BUSY:
                reason = f"another process has written to it for {WAIT_SECONDS:g} s"
            raise WriteFailed(ERRNOS[code], reason, str(self.path)) from fault

    def _close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def pause(self) -> bool:
        """Close the connection and lock it, unless it is in use. Return True if it is closed."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._writes:
            self._lock.release()
            return False
        self._close()
        return True

    def resume(self) -> None:
        """Unlock the connection after `pause`."""
        self._lock.release()

    def begin_child(self) -> None:
        """Begin without a connection in a forked process."""
        if self._connection:
            _INHERITED.append(self._connection)
        self._is_inherited = self._connection is not None
        self._connection, self._lock, self._writes = None, RLock(), False


_DATABASES: WeakValueDictionary[Path, StateDatabase] = WeakValueDictionary()
_LOCK = RLock()
_PAUSED: list[StateDatabase] = []
_INHERITED: list[sqlite3.Connection] = []
"""Connections of the parent process, which closing here could harm."""


def _before_fork() -> None:
    """Close the connections. A child of a process with an open one cannot use the file: SQLite would count on locks
    that only the parent has."""
    _LOCK.acquire()
    _PAUSED.extend(database for database in _DATABASES.values() if database.pause())


def _after_fork_in_parent() -> None:
    while _PAUSED:
        _PAUSED.pop().resume()
    _LOCK.release()


def _after_fork_in_child() -> None:
    _PAUSED.clear()
    for database in _DATABASES.values():
        database.begin_child()
    _LOCK.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def is_on_network(path: Path) -> bool:
    """Return True if a path is on a file system that other machines may use too."""
    kind = file_system(path)
    return kind in NETWORK or kind.startswith("fuse.")


def file_system(path: Path) -> str:
    """Return the type of the file system of a path, as the kernel names it; empty if unknown."""
    device = (path if path.exists() else path.parent).stat().st_dev
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            about, _, kind = line.partition(" - ")
            if about.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return kind.split()[0]
    return ""


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino
