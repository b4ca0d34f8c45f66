"""One process a SQLite file and any number on PostgreSQL, the right schema, and migrations that are the tables."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from typer.testing import CliRunner

from tessera.coordinator.cli import app
from tessera.coordinator.db.engine import Database, DatabaseInUse, SchemaBehind, alembic_config
from tessera.coordinator.db.tables import Table, VersionRow
from tessera.coordinator.settings import CoordinatorSettings, data_dir
from tests.support.cli import forked, tessera
from tests.support.databases import empty_in, url_in
from tests.support.processes import free_port
from tests.support.storage import add_run, add_task, add_worker


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
    assert database.at_head_or_later()
    monkeypatch.delattr(ScriptDirectory, "from_config")
    assert database.at_head_or_later()


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
def test_a_schema_that_is_behind_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    refused = coordinator(tmp_path, "serve")
    assert refused.returncode == 2
    assert "run 'tessera coordinator migrate'" in refused.stderr
    for _ in range(2):
        assert tessera("coordinator", "migrate", TESSERA_DATABASE_URL=empty_in(tmp_path)).returncode == 0
    database = Database(empty_in(tmp_path))
    database.require_head()
    database.close()


def test_a_schema_from_the_future_is_refused_too(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaBehind):
        database.require_head()


@pytest.mark.both_databases
def test_the_migrations_make_exactly_the_tables_of_the_code(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
        assert compare_metadata(context, Table.metadata) == []


@pytest.mark.both_databases
def test_the_migrations_can_be_undone_and_done_again(database: Database) -> None:
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    assert database.at_head()


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


def test_data_lie_in_the_users_state_folder_or_where_an_earlier_version_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HOME", str(tmp_path)), ("XDG_STATE_HOME", "relative")):
        monkeypatch.setenv(name, value)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert data_dir() == tmp_path / ".local/state/tessera/coordinator"
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
    assert data_dir() == Path("/srv/state/tessera/coordinator")
    Path("tessera-data").mkdir()
    assert CoordinatorSettings().database_url == f"sqlite:///{tmp_path}/here/tessera-data/tessera.db"


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
        with pytest.raises(SchemaBehind, match="of a newer version of Tessera: install that here too"):
            database.require_head()
        refused = tessera("coordinator", "migrate", TESSERA_DATABASE_URL=database.url.render_as_string(False))
    assert (refused.returncode, "newer version of Tessera: install that" in refused.stderr) == (2, True)


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


@pytest.mark.both_databases
def test_what_the_version_before_wrote_is_read_and_what_it_does_not_know_is_left_behind(database: Database) -> None:
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0001")
        connection.exec_driver_sql(
            "INSERT INTO runs VALUES ('run', 'run', 'running', NULL, '{}', 0, 0, 1, 1000, 1000, 1000)"
        )
        connection.exec_driver_sql("INSERT INTO versions VALUES ('run', 0, 'sha256:0', 1000)")
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    with database.transaction() as session:
        version = session.get_one(VersionRow, ("run", 0))
        assert (version.scalars, version.warnings) == ({}, [])
        add_worker(session)
        for name, held_out in (("central", False), ("at a site", True)):
            add_task(session, name, kind="evaluate", round_id=None, held_out=held_out)
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0001")
        assert connection.exec_driver_sql("SELECT id FROM tasks").scalars().all() == ["central"]


@pytest.mark.both_databases
def test_of_evaluations_that_the_version_before_asked_for_twice_the_one_that_is_done_stays(
    database: Database,
) -> None:
    with database.transaction() as session:
        add_run(session)
        for name in "wxyz":
            add_worker(session, name)
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0001")
        for worker, state, version in (
            ("w", "lapsed", 0),
            ("x", "accepted", 0),
            ("y", "accepted", 0),
            ("z", "failed", 0),
            ("w", "leased", 1),
            ("x", "offered", 1),
        ):
            connection.exec_driver_sql(
                f"INSERT INTO tasks VALUES ('{worker}{version}', 'run', NULL, '{worker}', 'evaluate', '{state}', "
                f"{version}, 0, '{{}}', 1, 1, NULL, NULL, 1000, NULL, 0, 0, NULL, '{{}}', NULL)"
            )
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
        left = connection.exec_driver_sql("SELECT id, state FROM tasks ORDER BY id").all()
    assert [tuple(row) for row in left] == [
        ("w0", "cancelled"),
        ("w1", "leased"),
        ("x0", "accepted"),
        ("x1", "cancelled"),
        ("y0", "cancelled"),
        ("z0", "failed"),
    ]


@pytest.mark.sqlite
def test_nobody_else_can_open_a_file_by_which_writers_take_turns(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        # As an earlier version left it.
        (tmp_path / "t.db.turn").touch(mode=0o644)
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
