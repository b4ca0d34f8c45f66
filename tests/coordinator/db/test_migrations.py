"""Each step of the schema on rows of every table, with the older code that it admits at work beside the newer; and
the changes that a step that admits older code may not make."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, MetaData, Table, delete, insert, inspect, select, update
from sqlalchemy.exc import SQLAlchemyError

from tessera.coordinator.db.engine import SCHEMA_DIR, Database, alembic_config
from tests.support.databases import empty_in

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


def oldest(revision: str) -> str:
    """The oldest code that works on a schema: that of the step itself, unless its name says so."""
    number, _, named = revision.partition("_from_")
    return named or number


def schema_of(connection: Connection, tables: list[Table]) -> dict[str, Any]:
    """What binds code that knows these tables: their columns, and constraints over these columns alone."""
    inspector, found = inspect(connection), {}
    for table in tables:
        name, columns = table.name, set(table.columns.keys())
        uniques = [each for each in inspector.get_indexes(name) if each["unique"]]
        over = [each["column_names"] for each in (*uniques, *inspector.get_unique_constraints(name))]
        found[name] = (
            {c["name"]: (str(c["type"]), c["nullable"]) for c in inspector.get_columns(name) if c["name"] in columns},
            {tuple(each) for each in over if columns.issuperset(filter(None, each))},
            {each["sqltext"] for each in inspector.get_check_constraints(name)},
        )
    return found


def require_additive(database: Database, config: Config, before: str, after: str) -> None:
    """The code of one step works on the schema of a later one, beside the code of that."""
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, before)
        tables = known(connection)
        for table in tables:
            connection.execute(insert(table), row(table, 1))
        bound = schema_of(connection, tables)
        command.upgrade(config, after)
        assert schema_of(connection, tables) == bound
        kept(connection, tables, range(1, 2))
        # The newer code writes all that it knows; and what has no place for it yet, the older code.
        for table in known(connection):
            connection.execute(insert(table), row(table, 2))
        # The older code reads, writes, changes and removes rows of the columns that it knows.
        for table in tables:
            connection.execute(insert(table), row(table, 3))
            settable = next((c for c in table.columns if not c.foreign_keys and not c.primary_key), None)
            if settable is not None:
                same = [column == value(column, 3) for column in table.primary_key]
                assert connection.execute(update(table).where(*same).values({settable: value(settable, 3)})).rowcount
        kept(connection, tables, range(1, 4))
        for table in reversed(tables):
            assert connection.execute(delete(table)).rowcount == 3


# The last step is also repeated.
@pytest.mark.both_databases
@pytest.mark.parametrize(
    ("before", "after"),
    [(old, new) for i, new in enumerate(REVISIONS) for old in REVISIONS[:i] if oldest(new) <= old]
    + [(REVISIONS[-1], REVISIONS[-1])],
)
def test_code_works_on_the_schema_of_later_steps_that_name_it(empty: Database, before: str, after: str) -> None:
    require_additive(empty, alembic_config(), before, after)


def test_no_step_works_with_older_code_than_the_step_before_it() -> None:
    assert [oldest(each) for each in REVISIONS] == sorted(oldest(each) for each in REVISIONS)


@pytest.fixture
def stepped(tmp_path: Path, step: str) -> Config:
    """The steps of the schema, and one more that does this."""
    shutil.copytree(SCHEMA_DIR, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    names = {"revision": "9000_from_" + REVISIONS[-1][:4], "down_revision": REVISIONS[-1]}
    stated = "".join(f"{name} = {said!r}\n" for name, said in names.items())
    imports = "import sqlalchemy as sa\nfrom alembic import op\n"
    (tmp_path / "migrations" / "versions" / "9000_more.py").write_text(
        f"{imports}{stated}def upgrade() -> None:\n    {step}\n"
    )
    config = Config()
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    return config


def table(reference: str) -> str:
    of_run = f'sa.Column("run_id", sa.String(), {reference}nullable=False)'
    return f'op.create_table("more", {of_run}, sa.Column("note", sa.String()), sa.PrimaryKeyConstraint("run_id"))'


def altered(table: str, change: str) -> str:
    return f'with op.batch_alter_table("{table}") as batch: batch.{change}'


@pytest.mark.parametrize(
    "step",
    [
        'op.add_column("runs", sa.Column("more", sa.String()))',
        'op.add_column("runs", sa.Column("more", sa.BigInteger(), nullable=False, server_default="0"))',
        table('sa.ForeignKey("runs.id", ondelete="CASCADE"), '),
        table(""),
        'op.create_index("ix_more", "runs", ["name"])',
    ],
)
def test_a_step_may_add_what_older_code_can_leave_out(empty: Database, stepped: Config) -> None:
    require_additive(empty, stepped, REVISIONS[-1], "9000_from_" + REVISIONS[-1][:4])


@pytest.mark.parametrize(
    "step",
    [
        altered("runs", 'add_column(sa.Column("more", sa.String(), nullable=False))'),
        altered("runs", 'drop_column("note")'),
        altered("runs", 'alter_column("note", new_column_name="remark")'),
        altered("runs", 'alter_column("reason", nullable=False, existing_type=sa.String())'),
        altered("runs", 'alter_column("note", type_=sa.LargeBinary(), postgresql_using="note::bytea")'),
        altered("runs", 'create_check_constraint("some", "note <> \'\'")'),
        'op.create_index("ix_more", "runs", ["name"], unique=True)',
        # Older code does not remove what refers to the rows that it removes.
        table('sa.ForeignKey("runs.id"), '),
        'op.drop_table("notices")',
        "op.execute(\"UPDATE runs SET note = 'other'\")",
    ],
)
def test_what_older_code_would_trip_over_is_found(empty: Database, stepped: Config) -> None:
    with pytest.raises((AssertionError, SQLAlchemyError)):
        require_additive(empty, stepped, REVISIONS[-1], "9000_from_" + REVISIONS[-1][:4])
