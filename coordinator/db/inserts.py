"""Inserts of rows that may exist already, in one statement each."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import Table

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
