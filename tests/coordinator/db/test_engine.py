"""One process a SQLite file and any number on PostgreSQL, the right schema, and migrations that are the tables."""

from __future__ import annotations

import gc
import os
import subprocess
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from typer.testing import CliRunner

from tessera.coordinator.cli import app
from tessera.coordinator.db.engine import Database, DatabaseInUse, SchemaMismatch
from tessera.coordinator.db.tables import SiteRow, Table
from tessera.coordinator.settings import CoordinatorSettings, data_dir
from tests.support.cli import forked, tessera
from tests.support.databases import empty_in, url_in
from tests.support.processes import free_port
from tests.support.storage import migrated


def coordinator(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command of the coordinator, on the test's database, as a process of its own."""
    settings = {
        "TESSERA_DATABASE_URL": empty_in(folder),
        "TESSERA_BLOB_URL": str(folder / "blobs"),
        "TESSERA_STAGING_DIR": str(folder / "staging"),
        "TESSERA_PORT": str(free_port()),
    }
    return forked(*arguments, module="tessera.coordinator", **{**settings, **more})


def test_a_stranger_s_readiness_checks_do_not_read_the_migrations_each_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database.schema() == "current"
    monkeypatch.delattr(ScriptDirectory, "from_config")
    assert database.schema() == "current"


@pytest.mark.sqlite
@pytest.mark.parametrize("duty", ["serve", "conduct"])
def test_a_second_process_on_a_sqlite_file_is_sent_to_postgresql(
    database: Database, tmp_path: Path, duty: str
) -> None:
    database.hold(duty)
    refused = coordinator(tmp_path, duty)
    assert refused.returncode == 2
    assert "another coordinator process uses" in refused.stderr
    assert "PostgreSQL" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.sqlite
def test_the_file_is_free_again_when_its_holder_closes_it(database: Database, tmp_path: Path) -> None:
    other = Database(str(database.url))
    database.hold("serve")
    with pytest.raises(DatabaseInUse):
        other.hold("serve")
    # Another duty is no rival.
    other.hold("conduct")
    other.close()
    database.close()
    other.hold("serve")
    other.close()


@pytest.mark.both_databases
def test_a_closed_database_is_freed_with_all_that_it_kept(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    with database.transaction() as session:
        # SQLAlchemy keeps the statement that it compiles for this.
        session.add(SiteRow(id="a", name="a", created_at=0.0))
    freed = weakref.ref(database)
    database.close()
    del database, session
    gc.collect()
    assert freed() is None


@pytest.mark.both_databases
def test_a_schema_that_is_behind_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    refused = coordinator(tmp_path, "serve")
    assert refused.returncode == 2
    assert "Run 'tessera coordinator migrate'" in refused.stderr
    for _ in range(2):
        assert tessera("coordinator", "migrate", TESSERA_DATABASE_URL=empty_in(tmp_path)).returncode == 0
    database = Database(empty_in(tmp_path))
    database.require_head()
    database.close()


def described(database: Database) -> list[object]:
    """Return the schema in full: columns, types, defaults, keys, constraints, indexes and their names."""

    def plain(part: Any) -> str:
        return str({**part, "dialect_options": [str(value) for value in part.get("dialect_options", {}).values()]})

    with database.engine.connect() as connection:
        found = inspect(connection)
        parts = (found.get_columns, found.get_indexes, found.get_unique_constraints, found.get_foreign_keys)
        return [
            (table, found.get_pk_constraint(table), *(sorted(map(plain, part(table))) for part in parts))
            for table in sorted(found.get_table_names())
            if table != "alembic_version"
        ]


@pytest.mark.both_databases
def test_the_migrations_make_exactly_the_tables_of_the_code(database: Database, tmp_path: Path) -> None:
    with closing(Database(empty_in(tmp_path, "created"))) as created:
        Table.metadata.create_all(created.engine)
        assert described(database) == described(created)


@pytest.mark.both_databases
@pytest.mark.parametrize("revision", ["0027", None])
def test_a_database_older_than_the_first_release_is_refused_and_left_alone(
    tmp_path: Path, revision: str | None
) -> None:
    with closing(Database(url_in(tmp_path))) as database, database.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM alembic_version")
        if revision:
            connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{revision}')")
    for arguments in (["migrate"], ["serve"], ["serve", "--migrate"], ["conduct"], ["token"]):
        refused = coordinator(tmp_path, *arguments)
        assert refused.returncode == 2
        assert "is older than Tessera 0.1.0 and cannot be upgraded. Export the models" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert "is older than Tessera 0.1.0" in coordinator(tmp_path, "doctor").stdout
    with closing(Database(url_in(tmp_path))) as database, database.engine.begin() as connection:
        left = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars().all()
        assert left == ([revision] if revision else [])


def test_a_setting_that_cannot_be_read_is_named_and_a_password_is_not_shown(tmp_path: Path) -> None:
    done = coordinator(tmp_path, "serve", TESSERA_PORT="many", TESSERA_LEASE_SECONDS="-1")
    assert done.returncode == 2
    assert "TESSERA_PORT" in done.stderr
    assert "TESSERA_LEASE_SECONDS" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_file_is_made_for_its_owner_alone_and_keeps_the_mode_it_has(tmp_path: Path) -> None:
    file = tmp_path / "t.db"

    def modes() -> set[int]:
        with closing(Database(f"sqlite:///{file}")) as database, database.transaction() as session:
            session.execute(text("CREATE TABLE IF NOT EXISTS t (n)"))
            return {path.stat().st_mode & 0o777 for path in tmp_path.glob("t.db*") if path.suffix != ".turn"}

    assert modes() == {0o600}
    file.chmod(0o640)
    assert modes() == {0o640}


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("sqlite:///{folder}/text", 2, "{folder}/text cannot be used: it is no file of SQLite; name another"),
        # A folder that is not mounted yet, or a server that starts later: a service manager tries again.
        ("sqlite:///{folder}", 1, "SQLite cannot open it; name a file in a folder where this user may write"),
        ("postgresql://u:hunter2@127.0.0.1:9/x", 1, "Connection refused; check that the server runs and admits"),
        ("sqlite:///{folder}/text/t.db", 2, "the database's folder {folder}/text does not exist or is closed to"),
        # Looking at it is an error, as where a folder on the way is closed to this user.
        (f"sqlite:///{{folder}}/{256 * 'x'}/t.db", 2, "; create it, or name another in TESSERA_DATABASE_URL"),
        ("sqlite:///:memory:", 2, "name a file"),
        ("nonsense hunter2", 2, "is no URL of a database; write sqlite:////folder/tessera.db"),
        ("postgresql://u:hunter2@127.0.0.1:port/x", 2, "is no URL of a database; write"),
        ("mysql://u:hunter2@h/x", 2, "TESSERA_DATABASE_URL begins with sqlite:/// or postgresql://"),
    ],
)
def test_a_database_that_cannot_be_used_is_one_line_with_the_remedy(
    tmp_path: Path, url: str, status: int, message: str
) -> None:
    (tmp_path / "text").write_text("no database")
    places = {
        "TESSERA_BLOB_URL": str(tmp_path / "b"),
        "TESSERA_STAGING_DIR": str(tmp_path / "s"),
        "TESSERA_PORT": "1",
    }
    for name in ("migrate", "token", "conduct"):
        done = tessera("coordinator", name, TESSERA_DATABASE_URL=url.format(folder=tmp_path), **places)
        assert (done.returncode, done.stdout) == (status, "")
        assert message.format(folder=tmp_path) in done.stderr
        assert (done.stderr.count("\n"), "hunter2" in done.stderr) == (1, False)


def test_verify_of_a_database_that_is_away_finds_no_faults(tmp_path: Path) -> None:
    places = {"TESSERA_BLOB_URL": str(tmp_path / "b"), "TESSERA_STAGING_DIR": str(tmp_path / "s")}
    done = tessera("coordinator", "verify", TESSERA_DATABASE_URL="postgresql://u@127.0.0.1:9/x", **places)
    # Faults would be 1.
    assert (done.returncode, done.stdout) == (2, "")


def test_data_lie_in_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOME", str(tmp_path)), ("XDG_STATE_HOME", "relative")):
        monkeypatch.setenv(name, value)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert data_dir() == tmp_path / ".local/state/tessera/coordinator"
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
    assert CoordinatorSettings().database_url == "sqlite:////srv/state/tessera/coordinator/tessera.db"


def test_a_command_of_the_database_alone_needs_no_folder_for_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TESSERA_DATABASE_URL", url_in(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["token", "--name", "ann"])
    assert (done.exit_code, "admin token (shown only this once): " in done.stderr) == (0, True), done.output


def test_a_database_of_a_newer_version_is_not_told_to_be_migrated(tmp_path: Path) -> None:
    with closing(Database(url_in(tmp_path))) as database:
        with database.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999_newer'")
        with pytest.raises(SchemaMismatch, match=r"of a newer version of Tessera\. Install that version here too"):
            database.require_head()
        refused = tessera("coordinator", "migrate", TESSERA_DATABASE_URL=database.url.render_as_string(False))
    assert (refused.returncode, "newer version of Tessera. Install that" in refused.stderr) == (2, True)


def test_what_is_shown_of_a_database_holds_no_password() -> None:
    database = Database("postgresql://u:hunter2@127.0.0.1:9/x?sslmode=require&password=hunter3")
    assert database.shown == "postgresql+psycopg://u:***@127.0.0.1:9/x?password=***&sslmode=require"
    database.close()


def test_methods_that_cannot_be_used_are_named_before_anything_is_served(tmp_path: Path) -> None:
    url_in(tmp_path)
    refused = coordinator(tmp_path, "conduct", TESSERA_METHODS=str(tmp_path / "none"))
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("none, which is not a folder: create it or remove it there")
    assert "Traceback" not in refused.stderr


@pytest.mark.sqlite
def test_the_database_is_durable_and_checks_its_references(database: Database) -> None:
    with database.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    # synchronous: 2 is FULL.
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


@pytest.mark.sqlite
def test_nobody_else_can_open_a_file_by_which_writers_take_turns(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        database = Database(f"sqlite:///{tmp_path}/t.db")
        database.hold("serve")
        with database.transaction():
            pass
        database.close()
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("t.db*")}
    assert modes == dict.fromkeys(modes, "0o600")
    assert {"t.db.turn", "t.db.serve.lock"} <= set(modes)


@pytest.mark.parametrize(("oldest", "schema"), [("0099", "ahead"), ("0100", "ahead"), ("0101", "newer")])
def test_a_newer_schema_that_names_this_one_or_an_older_is_served_and_conducted(
    tmp_path: Path, oldest: str, schema: str
) -> None:
    with closing(Database(url_in(tmp_path))) as database:
        with database.engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '9999_from_{oldest}'")
        assert database.schema() == schema
        # A backup would lack what this version does not know.
        with pytest.raises(SchemaMismatch, match="Install that version here too"):
            database.require_head()
        if schema == "ahead":
            database.require_head(or_ahead=True)
            database.migrate()
            assert database.schema() == "ahead"
            return
        for refused in (database.migrate, lambda: database.require_head(or_ahead=True)):
            with pytest.raises(SchemaMismatch, match="of a newer version"):
                refused()
