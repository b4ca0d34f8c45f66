"""Each step of the schema, up and down, on rows of every table; and the code of the step before at work on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, MetaData, Table, delete, insert, select, update

from tessera.coordinator.db.engine import Database, alembic_config
from tests.support.databases import empty_in

pytestmark = pytest.mark.both_databases

RENAMED = {
    "0013": {("tasks", "numbers"): "metrics", ("tasks", "leases"): "attempts", ("versions", "numbers"): "scalars"}
}
"""Columns that a step gives another name. The code before it is to be stopped first."""

REVISIONS = [step.revision for step in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]


LATEST = REVISIONS[-4:]
"""The last three steps: what a coordinator in use may still take."""


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Database]:
    database = Database(empty_in(tmp_path))
    yield database
    database.close()


def value(column: Column[Any], number: int) -> Any:
    """What the row of this number has in a column; where it refers to another table, the key of the row there."""
    for reference in column.foreign_keys:
        return value(reference.column, number)
    return {
        str: f"{column.table.name}.{column.name}.{number}",
        int: number,
        float: number + 0.5,
        bool: False,
        bytes: bytes([number]),
        object: {"number": number},
    }[column.type.python_type]


def row(table: Table, number: int) -> dict[str, Any]:
    return {column.name: value(column, number) for column in table.columns}


def known(connection: Connection) -> list[Table]:
    """The tables as they are now: what the code of this step knows."""
    metadata = MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def kept(connection: Connection, tables: list[Table], metrics: range) -> None:
    """Each table has the rows of these numbers, and no others."""
    for table in tables:
        found = [dict(found) for found in connection.execute(select(table)).mappings()]
        expected = [row(table, number) for number in metrics]
        assert sorted(found, key=repr) == sorted(expected, key=repr), table.name


def renamed(database: Database, tables: list[Table], before: str, after: str) -> None:
    """A step that renames columns keeps every value under the new name, and so does the way back."""
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), after)
        for table in known(connection):
            old = {new: name for (of, name), new in RENAMED[after].items() if of == table.name}
            (before_it,) = (one for one in tables if one.name == table.name)
            expected = {c.name: value(before_it.columns[old.get(c.name, c.name)], 1) for c in table.columns}
            assert dict(connection.execute(select(table)).mappings().one()) == expected, table.name
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), before)
        kept(connection, tables, range(1, 2))


@pytest.mark.parametrize(
    "revisions", [pytest.param(LATEST, id="latest"), pytest.param(REVISIONS, id="all", marks=pytest.mark.long)]
)
def test_a_step_keeps_every_row_and_the_code_before_it_works_on(empty: Database, revisions: list[str]) -> None:
    with empty.engine.begin() as connection:
        command.upgrade(alembic_config(connection), revisions[0])
    for before, after in pairwise(revisions):
        with empty.engine.begin() as connection:
            tables = known(connection)
            for table in tables:
                connection.execute(insert(table), row(table, 1))
        if after in RENAMED:
            renamed(empty, tables, before, after)
        else:
            stepped(empty, tables, before, after)
        # The next step begins with rows of its own.
        with empty.engine.begin() as connection:
            for table in reversed(tables):
                connection.execute(delete(table))
            command.upgrade(alembic_config(connection), after)


def stepped(database: Database, tables: list[Table], before: str, after: str) -> None:
    """Any other step, from where its code before has rows to where it is undone."""
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), after)
        kept(connection, tables, range(1, 2))
    # The code before the step still runs: it reads, writes and changes rows of the columns that it knows.
    with database.engine.begin() as connection:
        for table in tables:
            connection.execute(insert(table), row(table, 2))
            settable = next((c for c in table.columns if not c.foreign_keys and not c.primary_key), None)
            if settable is not None:
                same = [column == value(column, 2) for column in table.primary_key]
                assert connection.execute(update(table).where(*same).values({settable: value(settable, 2)})).rowcount
        kept(connection, tables, range(1, 3))
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), before)
        kept(connection, tables, range(1, 3))
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), after)
        kept(connection, tables, range(1, 3))


def test_updates_know_the_version_that_earlier_coordinators_merged_them_in(empty: Database) -> None:
    ends = [("merging", "accepted"), ("committed", "merged"), ("committed", "left_out"), ("abandoned", "left_out")]
    with empty.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0012")
        tables = known(connection)
        for number, (round_state, state) in enumerate(ends):
            states = {"rounds": {"state": round_state}, "tasks": {"kind": "train", "state": state}}
            for table in tables:
                connection.execute(insert(table), {**row(table, number), **states.get(table.name, {})})
        command.upgrade(alembic_config(connection), "0014")
        found = connection.exec_driver_sql("SELECT version_number, merged_in FROM tasks ORDER BY version_number")
        assert found.fetchall() == [(0, 1), (1, 2), (2, 3), (3, None)]


def test_totals_have_what_earlier_coordinators_accepted(empty: Database) -> None:
    with empty.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0025")
        tables = known(connection)
        for number, (kind, state) in enumerate(
            [("train", "merged"), ("evaluate", "accepted"), ("agree", "accepted"), ("train", "rejected")]
        ):
            about = {"kind": kind, "state": state, "run_id": "runs.id.0", "worker_id": "workers.id.0"}
            about |= {"round_id": None, "upload_bytes": 10, "download_bytes": number}
            for table in tables:
                connection.execute(insert(table), {**row(table, number), **(about if table.name == "tasks" else {})})
        command.upgrade(alembic_config(connection), "0026")
        moved = "updates, fetches, upload_bytes, download_bytes, evaluation_bytes"
        found = connection.exec_driver_sql(f"SELECT {moved} FROM runs WHERE id = 'runs.id.0'")
        assert found.one() == (1, 1, 20, 1, 1)
        counts = connection.exec_driver_sql("SELECT accepted, faulty FROM workers WHERE id = 'workers.id.0'")
        assert counts.one() == (3, 1)
