"""Tables that a visitor sorts: `?sort=column`, or `?sort=-column` from the highest value to the lowest."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query
from sqlalchemy import ColumnElement

T = TypeVar("T")


@dataclass(frozen=True)
class Sorting:
    """The column that a visitor chose, and its direction; empty for the order that the page has by itself."""

    sort: Annotated[str, Query(max_length=32)] = ""

    @property
    def column(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def descending(self) -> bool:
        return self.sort.startswith("-")

    def ordering(self, columns: Mapping[str, ColumnElement[Any]]) -> list[ColumnElement[Any]]:
        """Return the chosen order for a query; none if no such column was chosen."""
        if (column := columns.get(self.column)) is None:
            return []
        # A column without a value is last in both directions, on both databases.
        return [column.is_(None), column.desc() if self.descending else column]

    def sorted(self, rows: Iterable[T], columns: Mapping[str, Callable[[T], Any]]) -> list[T]:
        """Return rows in the chosen order, those without a value last; as they are if no such column was chosen."""
        rows = list(rows)
        if (key := columns.get(self.column)) is None:
            return rows
        known = sorted((row for row in rows if key(row) is not None), key=key, reverse=self.descending)
        return known + [row for row in rows if key(row) is None]


Sorted = Annotated[Sorting, Depends()]
PageNumber = Annotated[int, Query(ge=1, le=10_000)]
