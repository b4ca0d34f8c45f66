"""The database: one engine, one way to write, one way to read, one clock."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

import migrations

SCHEMA_DIR = Path(migrations.__file__).parent
_READING = "tessera_reading"


class DatabaseInUse(RuntimeError):
    """Another coordinator process has this SQLite file."""


class NotAFile(RuntimeError):
    """A SQLite database that is not a file cannot be a coordinator's."""


class SchemaBehind(RuntimeError):
    """The database's schema is not the one that this code needs."""


class Database:
    """Sessions on one database. On SQLite there is one writer at a time, and a reader sees one moment."""

    def __init__(self, url: str, clock: Callable[[], float] | None = None) -> None:
        self.url = make_url(url)
        self._is_sqlite = self.url.get_backend_name() == "sqlite"
        if self._is_sqlite:
            if not self.url.database or self.url.database == ":memory:":
                raise NotAFile(
                    f"{url} is a database in memory, which no other process or restart would see; name a file"
                )
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        self.engine = create_engine(self.url, pool_pre_ping=not self._is_sqlite, pool_size=20, max_overflow=40)
        if self._is_sqlite:
            _tune_sqlite(self.engine)
        self._reading = self.engine.execution_options(**{_READING: True})
        # With SQLite the database's clock is this machine's; time.time spares a query.
        self._clock = clock or time.time
        self._lock: IO[str] | None = None

    def now(self) -> float:
        """Seconds since 1970 by the clock that judges every deadline."""
        return self._clock()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A session whose changes are all committed when it ends, or none of them."""
        with self._turn(), Session(self.engine) as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One writer after the other, in whichever process: SQLite itself lets those who wait look again only every
        few milliseconds, and then every few tens of them."""
        if not self._is_sqlite:
            yield
            return
        with Path(f"{self.url.database}.turn").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """A session to read with, that sees one moment and holds up no writer."""
        with Session(self._reading) as session:
            yield session

    def close(self) -> None:
        self.engine.dispose()
        if self._lock:
            self._lock.close()

    def hold(self, duty: str, *, wait: bool = False) -> None:
        """Marks this process as the one that does this duty on a SQLite file, until it ends or closes the database.

        Raises DatabaseInUse if another process has done so, unless it is to `wait` for that one's end.
        """
        if not self._is_sqlite:
            return
        lock = Path(f"{self.url.database}.{duty}.lock").open("w")  # noqa: SIM115 (open as long as it is held)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise DatabaseInUse(
                f"another coordinator process uses {self.url.database} to {duty}; SQLite has one of each at a time. "
                "Stop that one, or put TESSERA_DATABASE_URL on PostgreSQL to run several."
            ) from None
        self._lock = lock

    # ------------------------------------------------------------ schema

    def at_head(self) -> bool:
        with self._reading.connect() as connection:
            present = MigrationContext.configure(connection).get_current_heads()
        return set(present) == set(ScriptDirectory.from_config(alembic_config()).get_heads())

    def require_head(self) -> None:
        """Raises SchemaBehind unless the schema is the one that this code needs."""
        if not self.at_head():
            shown = self.url.render_as_string(hide_password=True)
            raise SchemaBehind(f"the schema of {shown} is not at head; run 'tessera coordinator migrate'")


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCHEMA_DIR))
    config.attributes["connection"] = connection
    return config


def _tune_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connected(connection: Any, record: object) -> None:  # noqa: ARG001 (the event's signature)
        # The driver would begin a transaction only at the first write, too late to read and then write safely.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=30000"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        # A writer takes its turn at once: one that had read first could no longer write after another did.
        reading = connection.get_execution_options().get(_READING, False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
