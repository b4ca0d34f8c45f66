"""Inserts of rows that may exist already, in one statement each."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Table as SchemaTable
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import Table

_INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}


def insert_missing(session: Session, table: type[Table], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, all with the same columns; existing ones stay as they are."""
    if rows:
        # They may refer to rows that the session has not written yet.
        session.flush()
        session.connection().execute(_insert(session, table).on_conflict_do_nothing(), rows)


def insert_or_update(
    session: Session, table: type[Table], key: Sequence[str], row: Mapping[str, Any], changes: Mapping[str, Any]
) -> Any:
    """Insert a row, or make these changes to the one with the same `key`. Return the row's id."""
    statement = _insert(session, table).values(row).on_conflict_do_update(index_elements=key, set_=changes)
    return session.connection().execute(statement.returning(_schema(table).c.id)).scalar_one()


def _insert(session: Session, table: type[Table]) -> Any:
    return _INSERTS[session.get_bind().dialect.name](_schema(table))


def _schema(table: type[Table]) -> SchemaTable:
    schema = table.__table__
    assert isinstance(schema, SchemaTable)  # noqa: S101 (for the types: none of ours is a join)
    return schema
