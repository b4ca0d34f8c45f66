"""Rows of Arrow streams, the format of the files of `datasets`, mapped so that memory holds those in use.

Loaders import this module: it must stay light.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_NOTES = b"notes"


class ArrowRows:
    """The rows of mapped Arrow streams, one after another."""

    def __init__(self, maps: Sequence[mmap.mmap]) -> None:
        """Read the batches' places. Raises ArrowException and ValueError for a damaged file."""
        self._maps = maps
        self.schema: pa.Schema = pa.ipc.open_stream(pa.py_buffer(maps[0])).schema
        streams = (pa.ipc.open_stream(pa.py_buffer(each)) for each in maps)
        read = [each for stream in streams for each in stream.iter_batches_with_custom_metadata()]
        self._batches = [each.batch for each in read]
        self._starts = np.cumsum([0, *map(len, self._batches)])
        self._end = read[-1].custom_metadata if read else None

    def __reduce__(self) -> tuple[type[ArrowRows], tuple[Sequence[mmap.mmap]]]:
        """Have another process map the files itself. Fails for an anonymous one."""
        return ArrowRows, (self._maps,)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def notes(self) -> Mapping[str, Any]:
        """The notes that `write_rows` made at the end. Raises LookupError for a file without its end."""
        found: Mapping[str, Any] = json.loads((self._end or {})[_NOTES])
        return found

    def cells(self, name: str, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
        """Yield a column's cells in these rows by batch, with the places of the batch's rows among `rows`.

        The cells are copies: the pages of the file are given back, which would count as this process's memory until
        they are needed elsewhere.
        """
        of_batches = np.searchsorted(self._starts, rows, side="right") - 1
        for batch in np.unique(of_batches).tolist():
            places = np.flatnonzero(of_batches == batch)
            column = plain(self._batches[batch].column(name))
            yield places, column.take(pa.array(rows[places] - self._starts[batch]))
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)

    def values(self, name: str, rows: NDArray[np.int64]) -> list[Any]:
        """Return a column's values in these rows."""
        found: list[Any] = [None] * len(rows)
        for places, cells in self.cells(name, rows):
            for place, value in zip(places.tolist(), cells.to_pylist(), strict=True):
                found[place] = value
        return found

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column, none of which is read yet."""
        return pa.chunked_array([batch.column(name) for batch in self._batches], self.schema.field(name).type)


def write_rows(file: BinaryIO, batches: Iterator[pa.RecordBatch], notes: Mapping[str, Any] = {}) -> None:
    """Write batches of one schema as an Arrow stream. `notes` may be filled in while the batches are made."""
    first = next(batches)
    with pa.ipc.new_stream(pa.PythonFile(file, "w"), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)
        writer.write_batch(first.slice(0, 0), {_NOTES: json.dumps(notes).encode()})


def written_rows(file: mmap.mmap) -> ArrowRows:
    """Return the rows that `write_rows` wrote. Raises ArrowException, ValueError or LookupError if damaged."""
    rows = ArrowRows([file])
    _ = rows.notes
    return rows


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values that every function of Arrow takes: without views and runs."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_dictionary(kind):
        of_values = plain_type(kind.value_type)
        return kind if of_values == kind.value_type else of_values
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, plain_type(each.type)) for each in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(plain_type(kind.value_type))
    return kind


def plain(cells: pa.Array) -> pa.Array:
    """Return the same cells in their plain type."""
    kind = plain_type(cells.type)
    # Arrow cannot cast runs, and casts some nested views to invalid arrays.
    return cells if kind == cells.type else pa.array(cells.to_pylist(), kind)
