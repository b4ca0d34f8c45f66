"""Each step of the schema on rows of every table, and the code of the step before at work on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, MetaData, Table, insert, select, update

from tessera.coordinator.db.engine import Database, alembic_config
from tests.support.databases import empty_in

pytestmark = pytest.mark.both_databases

REVISIONS = [step.revision for step in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]


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


def kept(connection: Connection, tables: list[Table], numbers: range) -> None:
    """Each table has the rows of these numbers, and no others."""
    for table in tables:
        found = [dict(found) for found in connection.execute(select(table)).mappings()]
        expected = [row(table, number) for number in numbers]
        assert sorted(found, key=repr) == sorted(expected, key=repr), table.name


# The last step is also repeated.
@pytest.mark.parametrize(("before", "after"), list(pairwise([*REVISIONS, REVISIONS[-1]])))
def test_a_step_keeps_every_row_and_the_code_before_it_works_on(empty: Database, before: str, after: str) -> None:
    with empty.engine.begin() as connection:
        command.upgrade(alembic_config(connection), before)
        tables = known(connection)
        for table in tables:
            connection.execute(insert(table), row(table, 1))
        command.upgrade(alembic_config(connection), after)
        kept(connection, tables, range(1, 2))
        # The code before the step still runs: it reads, writes and changes rows of the columns that it knows.
        for table in tables:
            connection.execute(insert(table), row(table, 2))
            settable = next((c for c in table.columns if not c.foreign_keys and not c.primary_key), None)
            if settable is not None:
                same = [column == value(column, 2) for column in table.primary_key]
                assert connection.execute(update(table).where(*same).values({settable: value(settable, 2)})).rowcount
        kept(connection, tables, range(1, 3))
