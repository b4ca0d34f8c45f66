"""The database: one engine, one way to write, one way to read, one clock.

SQLite or PostgreSQL, with the same code on both: all processes together have one writer at a time, so rows that a
transaction has read do not change before it writes.
"""

import fcntl
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, bindparam, create_engine, event, inspect, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session

from tessera import migrations
from tessera.coordinator.db.tables import Table
from tessera.shared.urls import without_password

SCHEMA_DIR = Path(migrations.__file__).parent
_READING = "tessera_reading"

DATABASE_AWAY = (OperationalError, InterfaceError, InternalError, NoConnection)
"""Errors raised when the database is away, busy or was restarted: nothing was done, and a retry may help."""

_DAMAGED = {sqlite3.SQLITE_CORRUPT}
_POSTGRES_DAMAGED = {"XX001", "XX002"}

TRUNCATIONS, TRUNCATION_SECONDS = 50, 0.1
"""Attempts to empty SQLite's log, which readers of the moment prevent, and the time between two."""
CHECK_SECONDS = 60.0
"""Time after which a check of SQLite's file gives up: it reads all of it."""

KEPT_CONNECTIONS = 5
"""Idle connections to PostgreSQL."""
CONNECT_SECONDS = 10
SILENT_SECONDS = 30
"""Time without a sign of life from the server's machine after which a connection ends."""
PROBE_SECONDS = 10
"""Interval at which that machine is asked for one when it sends nothing else."""
IDLE_SECONDS = 5
"""Idle time after which PostgreSQL ends a transaction: a process that is paused inside one must not block the
others."""
TURN_SECONDS = 15
"""Time that a writer waits for other threads of its process, and then for other processes, to release the write lock:
longer than an idle writer can hold it."""
STATEMENT_SECONDS = 30
DUTY_SECONDS = 15
"""Time after which PostgreSQL releases the locks of a process that has gone silent."""
LISTEN_SECONDS = 5
AGAIN_SECONDS = 1
"""Delay before listening again after the server was away."""
CLOCK_SECONDS = 10
"""Time for which the measured difference between PostgreSQL's clock and this process's is used."""
CLOCK_TRIES = 3
GOOD_TRIP_SECONDS = 0.05
"""A measurement of the clock that takes at most this long is not repeated."""


log = structlog.get_logger()

_SQLITE_REASONS = {
    "database disk image is malformed": "it is damaged: see `tessera docs operating/backups`",
    "file is not a database": "it is no file of SQLite; name another in TESSERA_DATABASE_URL, or restore a backup",
    "database or disk is full": "the disk is full: free some space",
    "unable to open database file": "SQLite cannot open it; name a file in a folder where this user may write",
    "attempt to write a readonly database": "this user may not write to it",
}


def reason_of(fault: Exception) -> str:
    """Describe the fault of an unusable database, and the remedy, in one line without SQLAlchemy's additions."""
    if isinstance(fault, DatabaseDamaged):
        return "it is damaged: see `tessera docs operating/backups`"
    cause = fault.orig if isinstance(fault, DBAPIError) and fault.orig else fault
    line = next(iter(str(cause).splitlines()), "") or type(cause).__name__
    remedy = "" if isinstance(cause, sqlite3.Error | OSError) else "; check that the server runs and admits this user"
    return _SQLITE_REASONS.get(line, f"{line}{remedy}")


class DatabaseDamaged(OperationalError):
    """The database's file has bytes that it cannot have. It is reported as a database that is away: nothing was done,
    and no run is at fault."""


def is_away(fault: Exception) -> bool:
    """Return True if a retry may help: the database is away, and not damaged."""
    return isinstance(fault, DATABASE_AWAY) and not isinstance(fault, DatabaseDamaged)


def log_away(fault: Exception, **about: object) -> None:
    """Log in a line that the database is away; damage was logged when it was found."""
    if not isinstance(fault, DatabaseDamaged):
        log.warning("database.away", **about, detail=str(fault).partition("\n")[0])


class DatabaseInUse(RuntimeError):
    """Another coordinator process uses this SQLite file."""


class UnknownDatabase(RuntimeError):
    """The URL is neither of PostgreSQL nor of a file of SQLite that can be created."""


class SchemaMismatch(RuntimeError):
    """The database has another schema than this version of the coordinator."""


S = TypeVar("S", bound=Session)

Schema = Literal["current", "behind", "ahead", "newer", "unsupported", "encoding"]
"""`ahead` is a newer one on which this version can serve and conduct."""

SCHEMA_FAULTS: dict[Schema, tuple[str, str]] = {
    "behind": ("is not up to date", "Run 'tessera coordinator migrate'."),
    "ahead": (
        "is of a newer version of Tessera, beside which this one can only serve and conduct",
        "Install that version here too.",
    ),
    "newer": ("is of a newer version of Tessera", "Install that version here too."),
    "unsupported": (
        "is older than Tessera 0.1.0 and cannot be upgraded",
        (
            "Export the models that you need with the version that made it, then name a new database in "
            "TESSERA_DATABASE_URL and a new store in TESSERA_BLOB_URL."
        ),
    ),
    "encoding": (
        "would be in a database whose encoding is not UTF-8, which cannot hold every name",
        "Create one: CREATE DATABASE tessera TEMPLATE template0 ENCODING 'UTF8'; name it in TESSERA_DATABASE_URL.",
    ),
}
"""The fault of each other schema, and its remedy."""


class Database:
    """Sessions on one database. There is one writer at a time, and a reader sees a snapshot.

    `connections` bounds those that one process has to PostgreSQL.
    """

    def __init__(self, url: str, clock: Callable[[], float] | None = None, *, connections: int = 20) -> None:
        self.url = _with_driver(_parsed(url))
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            if not self.url.database or self.url.database == ":memory:":
                raise UnknownDatabase(
                    f"{url} is a database in memory, which no other process or restart would see; name a file"
                )
            _make(Path(self.url.database))
            self.engine = self._sqlite()
            _take_turns(self.engine, "BEGIN IMMEDIATE", "BEGIN")
            self._reading = self.engine.execution_options(**{_READING: True})
            # SQLite's clock is this machine's clock; time.time avoids a query.
            self._clock = clock or time.time
        else:
            kept = min(KEPT_CONNECTIONS, connections)
            self.engine = _postgresql(self.url, pool_size=kept, max_overflow=connections - kept)
            _take_turns(self.engine, f"SELECT pg_advisory_xact_lock({_number('writing')})")
            self._reading = self.engine.execution_options(
                **{_READING: True}, isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
            # Locks, notifications and the clock have their own connections, so that they never wait for transactions.
            self._aside = _postgresql(self.url, pool_size=2, max_overflow=0, isolation_level="AUTOCOMMIT")
            self._clock = clock or _RemoteClock(self._asked_time)
        self._engines = [self.engine] if self.is_sqlite else [self.engine, self._aside]
        for engine in self._engines:
            event.listen(engine, "handle_error", self._note_damage, retval=True)
        self._writing = threading.Lock()
        self._lock: IO[str] | None = None
        self.damage: str | None = None

    def _sqlite(self) -> Engine:
        """Return an engine on SQLite's file, whose commits survive a power cut."""
        engine = create_engine(self.url, pool_size=20, max_overflow=40)
        _tune_sqlite(engine)
        return engine

    def _note_damage(self, context: ExceptionContext) -> DatabaseDamaged | None:
        """Return the error to raise in place of one that means damage, which is remembered."""
        fault = context.original_exception
        code = getattr(fault, "sqlite_errorcode", 0) & 0xFF
        if code not in _DAMAGED and getattr(fault, "sqlstate", None) not in _POSTGRES_DAMAGED:
            return None
        self._remember_damage(str(fault))
        return DatabaseDamaged(context.statement, None, fault)

    def _remember_damage(self, detail: str) -> None:
        """Remember that the database is damaged, and log it the first time."""
        if self.damage is None:
            self.damage = detail
            remedy = "Stop the coordinator and restore a backup: see `tessera docs operating/backups`."
            log.error("database.damaged", database=self.shown, detail=detail, remedy=remedy)

    def ended_uncleanly(self) -> bool:
        """Return True if the last process to use a SQLite file left a log beside it, or another one uses it now."""
        with suppress(OSError):
            return self.is_sqlite and Path(f"{self.url.database}-wal").stat().st_size > 0
        return False

    def check(self, seconds: float = CHECK_SECONDS) -> bool:
        """Read all of SQLite's file for at most this time; return True if that was enough. Raise DatabaseDamaged."""
        if not self.is_sqlite:
            return True
        until = time.monotonic() + seconds
        with self._reading.connect() as connection:
            raw: Any = connection.connection.dbapi_connection
            # Pages that this connection keeps in memory would be checked in place of the file's.
            raw.execute("PRAGMA shrink_memory")
            raw.set_progress_handler(lambda: time.monotonic() > until, 1_000)
            try:
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
            except OperationalError as fault:
                if getattr(fault.orig, "sqlite_errorcode", 0) != sqlite3.SQLITE_INTERRUPT:
                    raise
                return False
            finally:
                raw.set_progress_handler(None, 0)
        if found != "ok":
            self._remember_damage(found)
            raise DatabaseDamaged(None, None, sqlite3.DatabaseError(found))
        return True

    @property
    def shown(self) -> str:
        """The URL without its password; a file's whole path."""
        file = str(Path(self.url.database or "").absolute()) if self.is_sqlite else self.url.database
        return without_password(self.url.set(database=file).render_as_string(hide_password=True))

    def now(self) -> float:
        """Return seconds since 1970 by the clock that decides every deadline."""
        return self._clock()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session whose changes are committed together at its end, or rolled back."""
        with self._turn(), Session(self.engine) as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Serialize the writers of all processes.

        A file lock wakes the next writer at once, while SQLite's own waiting polls every few milliseconds to tens of
        them. On PostgreSQL an advisory lock does it; here one thread at a time waits for it, with one connection.
        """
        if not self.is_sqlite:
            if not self._writing.acquire(timeout=TURN_SECONDS):
                raise NoConnection(f"other threads of this process had the write lock for {TURN_SECONDS} s")
            try:
                yield
            finally:
                self._writing.release()
            return
        with _lock_file(f"{self.url.database}.turn") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield

    def snapshot(self) -> Session:
        """Return a session, for `with`, that reads a snapshot and blocks no writer."""
        return Session(self._reading)

    def snapshot_for(self, kind: type[S]) -> S:
        """Return such a session of another class."""
        return kind(self._reading)

    def vacuum(self) -> None:
        """Rewrite an SQLite file without the bytes of rows that were deleted or changed; PostgreSQL's administrator
        decides when to do so there."""
        if not self.is_sqlite:
            return
        with self._turn(), self.engine.connect() as pooled:
            # Outside of any transaction, which SQLAlchemy would begin.
            connection: Any = pooled.connection.dbapi_connection
            connection.execute("VACUUM")
            for _ in range(TRUNCATIONS):
                busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy:
                    return
                time.sleep(TRUNCATION_SECONDS)
        structlog.get_logger().warning("database.log_not_truncated", remedy="Restart the coordinator.")

    def permit_idling(self, snapshot: Session) -> None:
        """Keep a snapshot open however long its reader pauses: it blocks no writer."""
        if not self.is_sqlite:
            snapshot.connection().exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")

    def close(self) -> None:
        for engine in self._engines:
            engine.dispose()
            # SQLAlchemy keeps compiled statements with their dialect, whose listener would keep this and its files.
            if event.contains(engine, "handle_error", self._note_damage):
                event.remove(engine, "handle_error", self._note_damage)
        if self._lock:
            self._lock.close()

    # ------------------------------------------------------------ several processes

    def hold(self, duty: str, *, wait: bool = False) -> None:
        """Hold this duty on a SQLite file for this process, until it ends or closes the database.

        If another process holds it, wait for its end with `wait`, else raise DatabaseInUse. On PostgreSQL any number
        of processes may hold it.
        """
        if not self.is_sqlite:
            return
        lock = _lock_file(f"{self.url.database}.{duty}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise DatabaseInUse(
                f"another coordinator process uses {self.url.database} to {duty}; SQLite has one of each at a time. "
                "Stop that one, or put TESSERA_DATABASE_URL on PostgreSQL to run several."
            ) from None
        self._lock = lock

    @contextmanager
    def alone(self, work: str) -> Iterator[bool]:
        """Yield True if this process alone does this work until the end of `with`.

        This avoids duplicate work but does not prevent it: a process that dies, or is silent for DUTY_SECONDS, loses
        the lock. The result of the work needs its own guard. On SQLite, `hold` ensures it.
        """
        if self.is_sqlite:
            yield True
            return
        with self._aside.connect() as connection:
            # Closing it releases the lock; the pool must not reuse it.
            connection.detach()
            connection.exec_driver_sql(f"SET idle_session_timeout = '{DUTY_SECONDS}s'")
            locked = bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_number(work)})").scalar())
            if not locked:
                yield False
                return
            ended = threading.Event()
            alive = threading.Thread(target=_stay, args=(connection, ended), name="alone", daemon=True)
            alive.start()
            try:
                yield True
            finally:
                ended.set()
                alive.join()

    def tell(self, channel: str, message: str) -> None:
        """Send a few bytes to the listeners of a PostgreSQL channel."""
        with self._aside.connect() as connection:
            connection.exec_driver_sql("SELECT pg_notify(%s, %s)", (channel, message))

    def heard(self, channel: str, ended: threading.Event) -> Iterator[str]:
        """Yield the messages of a PostgreSQL channel until `ended`; an empty one at first, and whenever messages may
        have been lost."""
        dbapi = self._aside.dialect.loaded_dbapi
        while not ended.is_set():
            try:
                with self._aside.connect() as connection:
                    connection.detach()
                    connection.exec_driver_sql(f"LISTEN {channel}")
                    yield ""
                    listening: Any = connection.connection.dbapi_connection
                    while not ended.is_set():
                        for notice in listening.notifies(timeout=LISTEN_SECONDS):
                            yield notice.payload
                        # Detects a server that disappeared without closing the connection.
                        connection.exec_driver_sql("SELECT 1")
            except (DBAPIError, dbapi.Error):
                ended.wait(AGAIN_SECONDS)

    def _asked_time(self) -> float:
        with self._aside.connect() as connection:
            return float(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())").scalar_one())

    # ------------------------------------------------------------ schema

    def schema(self) -> Schema:
        """Compare the schema with this version's."""
        with self._reading.connect() as connection:
            return _schema_of(connection)

    def require_head(self, *, or_ahead: bool = False) -> None:
        """Raise SchemaMismatch unless the schema is at head; or, with `or_ahead`, a newer one on which this version
        can serve and conduct."""
        schema = self.schema()
        if schema != "current" and not (or_ahead and schema == "ahead"):
            raise self._mismatch(schema)

    def migrate(self) -> None:
        """Migrate the schema to head, and leave alone a newer one on which this version can serve. Raise
        SchemaMismatch for other newer ones, and for those older than 0.1.0."""
        with self.engine.begin() as connection:
            if (schema := _schema_of(connection)) == "ahead":
                return
            if schema not in ("current", "behind"):
                raise self._mismatch(schema)
            command.upgrade(alembic_config(connection), "head")

    def _mismatch(self, schema: Schema) -> SchemaMismatch:
        fault, remedy = SCHEMA_FAULTS[schema]
        return SchemaMismatch(f"the schema of {self.shown} {fault}. {remedy}")


def _schema_of(connection: Connection) -> Schema:
    if (
        connection.dialect.name == "postgresql"
        and connection.exec_driver_sql("SHOW server_encoding").scalar() != "UTF8"
    ):
        return "encoding"
    first, head = _revisions()
    present = max(MigrationContext.configure(connection).get_current_heads(), default="")
    if present == head:
        return "current"
    if present > head:
        # `0102_from_0101` is the schema 0102, on which code from 0101 on works. The names sort as the numbers do.
        oldest = present.partition("_from_")[2]
        return "ahead" if "" < oldest <= head else "newer"
    is_empty = not present and Table.metadata.tables.keys().isdisjoint(inspect(connection).get_table_names())
    return "behind" if present >= first or is_empty else "unsupported"


@cache
def _revisions() -> tuple[str, str]:
    """Return the first and the last migration. To read them takes 15 ms, which callers without a token could demand
    at will."""
    scripts = ScriptDirectory.from_config(alembic_config())
    (first,), (head,) = scripts.get_bases(), scripts.get_heads()
    return first, head


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCHEMA_DIR))
    config.attributes["connection"] = connection
    return config


class _RemoteClock:
    """The database's clock: this process's monotonic clock plus an offset that is measured every few seconds.

    The error is at most half of a query's round trip, plus the drift of the two clocks in CLOCK_SECONDS.
    """

    def __init__(self, ask: Callable[[], float]) -> None:
        self._ask = ask
        self._asking = threading.Lock()
        # The offset from the monotonic clock, and the monotonic time until which it is used.
        self._known: tuple[float, float] | None = None

    def __call__(self) -> float:
        known = self._known
        outdated = known is None or time.monotonic() > known[1]
        # While one thread measures, the others use the previous offset.
        if outdated and self._asking.acquire(blocking=known is None):
            try:
                self._known = known = self._compared()
            finally:
                self._asking.release()
        assert known is not None  # noqa: S101 (for the types: the first measurement blocks)
        return known[0] + time.monotonic()

    def _compared(self) -> tuple[float, float]:
        best, trip = 0.0, float("inf")
        for _ in range(CLOCK_TRIES):
            began = time.monotonic()
            at = self._ask()
            ended = time.monotonic()
            # A process may be paused between the answer and its arrival.
            if ended - began < trip:
                best, trip = at - (began + ended) / 2, ended - began
            if trip < GOOD_TRIP_SECONDS:
                break
        return best, time.monotonic() + CLOCK_SECONDS


def _parsed(url: str) -> URL:
    """Raise UnknownDatabase without the URL, which may have a password in any place, unless it can be read."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise UnknownDatabase(
            "TESSERA_DATABASE_URL is no URL of a database; write sqlite:////folder/tessera.db or "
            "postgresql://user@host/name"
        ) from None


def _with_driver(url: URL) -> URL:
    """Raise UnknownDatabase unless it is SQLite or PostgreSQL."""
    kind = url.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise UnknownDatabase(
            f"Tessera keeps its tables in SQLite or PostgreSQL, and not in {kind}; TESSERA_DATABASE_URL begins with "
            "sqlite:/// or postgresql://"
        )
    return url.set(drivername="postgresql+psycopg") if kind == "postgresql" else url


def _make(file: Path) -> None:
    """Create the file closed to other users before SQLite does; its -wal and -shm get the same mode.

    Raises UnknownDatabase if its folder is not there: it is probably misspelt.
    """
    # `Path.is_dir` fails where a folder on the way is closed to this user.
    if not os.path.isdir(file.parent):  # noqa: PTH112
        raise UnknownDatabase(
            f"the database's folder {file.parent.absolute()} does not exist or is closed to this user; create it, or "
            "name another in TESSERA_DATABASE_URL"
        )
    # If it cannot be created, SQLite reports it.
    with suppress(OSError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))


def _lock_file(path: str) -> IO[str]:
    """Return a lock file that only its owner may open: any user who could lock it would stop the coordinator."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")  # noqa: PTH123 (open as long as it is held)


def _postgresql(url: URL, **options: Any) -> Engine:
    # Unix sockets ignore all but the first. Those in the URL take precedence.
    limits: dict[str, Any] = {
        # The driver would give bytes in place of strings where a server has no encoding.
        "client_encoding": "utf8",
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": PROBE_SECONDS,
        "keepalives_interval": PROBE_SECONDS,
        "keepalives_count": SILENT_SECONDS // PROBE_SECONDS - 1,
        "tcp_user_timeout": SILENT_SECONDS * 1000,
    }
    given = {name: value for name, value in limits.items() if name not in url.query}
    # Connections are checked before use: a restarted server has closed them all.
    engine = create_engine(url, pool_pre_ping=True, connect_args=given, **options)

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: object) -> None:  # noqa: ARG001 (the event's signature)
        seconds = {
            "idle_in_transaction_session_timeout": IDLE_SECONDS,
            "lock_timeout": TURN_SECONDS,
            "statement_timeout": STATEMENT_SECONDS,
        }
        connection.execute("".join(f"SET {name} = '{value}s';" for name, value in seconds.items()))
        connection.commit()

    return engine


def _take_turns(engine: Engine, writing: str, reading: str | None = None) -> None:
    """Begin each transaction with a statement. A writer takes the write lock before it reads, and releases it with
    its commit: if it had read first, it could no longer write after another writer did."""

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        if statement := reading if connection.get_execution_options().get(_READING, False) else writing:
            connection.exec_driver_sql(statement)


def _number(name: str) -> int:
    """Return the number of an advisory lock."""
    return int.from_bytes(hashlib.sha256(f"tessera {name}".encode()).digest()[:8], signed=True)


def _stay(connection: Connection, ended: threading.Event) -> None:
    """Keep the connection of a lock alive until the work has ended. If the database is away, the lock is lost."""
    with suppress(DBAPIError):
        while not ended.wait(DUTY_SECONDS / 3):
            connection.exec_driver_sql("SELECT 1")


def _tune_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: object) -> None:  # noqa: ARG001 (the event's signature)
        # The driver would begin a transaction only at the first write, too late to read and then write safely.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
            connection.execute(f"PRAGMA {pragma}")
        # SQLite's own changes ASCII letters only, unlike PostgreSQL's. No index has it.
        connection.create_function("lower", 1, lower, deterministic=True)


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


# ---------------------------------------------------------------- rows that may exist already

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


def insert_missing(session: Session, table: type[Table], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, all with the same columns; existing ones stay as they are."""
    if rows:
        # They may refer to rows that the session has not written yet.
        session.flush()
        session.connection().execute(_insert_missing(session.get_bind().dialect.name, table), rows)


def insert_or_update(
    session: Session, table: type[Table], key: tuple[str, ...], row: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    """Insert a row, or make these changes to the row with the same `key`."""
    statement = _insert_or_update(session.get_bind().dialect.name, table, key, tuple(changes))
    session.flush()
    session.connection().execute(statement, {**row, **{_NEW + name: value for name, value in changes.items()}})


_NEW = "new_"


@cache
def _insert_missing(dialect: str, table: type[Table]) -> Any:
    return _INSERTS[dialect](table).on_conflict_do_nothing()


@cache
def _insert_or_update(dialect: str, table: type[Table], key: tuple[str, ...], changes: tuple[str, ...]) -> Any:
    new: dict[str, Any] = {name: bindparam(_NEW + name) for name in changes}
    return _INSERTS[dialect](table).on_conflict_do_update(index_elements=key, set_=new)
