"""Values of examples that are read from a table when they are needed. Loaders import this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
U = TypeVar("U")

AT_ONCE = 4096
"""Number of rows to read together."""


@dataclass(frozen=True, eq=False, repr=False)
class Cells(Sequence[T], Generic[T]):
    """The values in some rows of a column. Memory holds the numbers of the rows, and the values while in use."""

    read: Callable[[NDArray[np.int64]], list[T]]
    """A function from numbers of rows to their values. Raises DataError."""
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        values = self.read(np.atleast_1d(self.rows[place]))
        return values if isinstance(place, slice) else values[0]

    def __iter__(self) -> Iterator[T]:
        for first in range(0, len(self), AT_ONCE):
            yield from self[first : first + AT_ONCE]

    def chosen(self, index: NDArray[np.int64]) -> Cells[T]:
        """Return the values at these places, without reading them."""
        return replace(self, rows=self.rows[index])

    def mapped(self, change: Callable[[T], U]) -> Cells[U]:
        """Return the function's result for each value."""
        return Cells(lambda rows: list(map(change, self.read(rows))), self.rows)


@dataclass(frozen=True, eq=False, repr=False)
class ByteCells:
    """The cells of one column of several files, one after the other: bytes, or records with bytes."""

    column: str
    files: Sequence[Path]
    begins: NDArray[np.int64]
    """The first row of each file, and the number of all rows."""
    read: Callable[[NDArray[np.int64]], list[Any]]
    """A function from numbers of rows to their cells. Raises DataError."""
    all_bytes: bool
    """True if every cell is known to contain bytes."""
    group_bytes: int = 0
    """The size of the largest part of a file that is read for one cell."""

    def file_of(self, row: int) -> Path:
        """Return the file that contains a row."""
        return self.files[int(np.searchsorted(self.begins, row, side="right")) - 1]
