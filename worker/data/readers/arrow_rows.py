"""Rows of Arrow streams, the format of the files of `datasets`, mapped so that memory holds those in use."""

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
        files = [[*pa.ipc.open_stream(pa.py_buffer(each)).iter_batches_with_custom_metadata()] for each in maps]
        self._batches = [each.batch for file in files for each in file]
        self._starts = np.cumsum([0, *map(len, self._batches)])
        self.begins = np.cumsum([0, *(sum(len(each.batch) for each in file) for file in files)])
        """The first row of each file, and the number of all rows."""
        self._lists: dict[str, list[tuple[NDArray[Any], NDArray[Any]] | None]] = {}
        """The offsets and the values of columns of lists, by batch."""
        self._end = files[-1][-1].custom_metadata if files[-1] else None

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

    def lists(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[Any] | None]:
        """Return a column's lists of numbers in these rows, as views of the files; None in a batch without lists."""
        if name not in self._lists:
            columns = [batch.column(name) for batch in self._batches]
            self._lists[name] = [
                None if each.null_count else (np.asarray(each.offsets), np.asarray(each.values)) for each in columns
            ]
        of_batches, at = self._located(rows)
        found = zip((self._lists[name][batch] for batch in of_batches), at, strict=True)
        return [each and each[1][each[0][row] : each[0][row + 1]] for each, row in found]

    def values(self, name: str, rows: NDArray[np.int64]) -> list[Any]:
        """Return a column's values in these rows."""
        of_batches, at = self._located(rows)
        columns = {batch: self._batches[batch].column(name) for batch in set(of_batches)}
        # One by one, since Arrow cannot take rows of all its types.
        values = [columns[batch][row].as_py() for batch, row in zip(of_batches, at, strict=True)]
        self.release()
        return values

    def _located(self, rows: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Return the batch of each row, and its place there."""
        of_batches = np.searchsorted(self._starts, rows, side="right") - 1
        return of_batches.tolist(), (rows - self._starts[of_batches]).tolist()

    def release(self) -> None:
        """Give pages back, which would count as this process's memory until they are needed elsewhere."""
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)

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
