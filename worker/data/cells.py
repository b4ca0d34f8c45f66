"""Values of examples that are read from a table when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
        """Return what the function makes of each value."""
        return Cells(lambda rows: list(map(change, self.read(rows))), self.rows)
