"""Columns of bytes, such as images, read where they are: in Parquet files, or in mapped Arrow files.

Parquet files of images are not converted, which would take their room again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from tessera.worker.data.cells import ByteCells
from tessera.worker.data.readers.arrow_rows import ArrowRows
from tessera.worker.errors import DataError


def byte_cells(files: Sequence[Path], rows: ArrowRows | None) -> dict[str, ByteCells]:
    """Return the cells of each column of bytes: in `rows`, which are mapped from the files, or in Parquet files."""
    schema = parquet.read_schema(files[0]) if rows is None else rows.schema
    names = [field.name for field in schema if _holds_bytes(field.type)]
    if rows is None:
        return {name: _in_parquet(files, name) for name in names}
    return {
        name: ByteCells(name, files, rows.begins, partial(rows.values, name), not _lacking(rows.column(name)))
        for name in names
    }


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_bytes(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _lacking(column: pa.ChunkedArray) -> int:
    """Return the number of cells without bytes, which Arrow files contain."""
    return sum(
        (chunk.field("bytes") if pa.types.is_struct(chunk.type) else chunk).null_count for chunk in column.chunks
    )


def _in_parquet(files: Sequence[Path], column: str) -> ByteCells:
    described = [parquet.read_metadata(file) for file in files]
    groups = [[each.row_group(place) for place in range(each.num_row_groups)] for each in described]
    chunks = [
        chunk
        for group in (group for of_file in groups for group in of_file)
        for place in range(group.num_columns)
        if (chunk := group.column(place)).path_in_schema in (column, f"{column}.bytes")
    ]
    all_bytes = all(
        chunk.statistics and chunk.statistics.has_null_count and not chunk.statistics.null_count for chunk in chunks
    )
    return ByteCells(
        column,
        files,
        np.cumsum([0, *(each.num_rows for each in described)]),
        _ParquetColumn(files, column, [[group.num_rows for group in of_file] for of_file in groups]).read,
        all_bytes,
        max((chunk.total_uncompressed_size for chunk in chunks), default=0),
    )


class _ParquetColumn:
    """A column of Parquet files. A whole row group is read for a cell, and remembered for the next one.

    Each process, and each thread of it, opens the files of its own.
    """

    def __init__(self, files: Sequence[Path], column: str, rows: Sequence[Sequence[int]]) -> None:
        """Describe the column of `files`, each with row groups of a number of `rows`."""
        self.files, self.column = files, column
        self._groups = [(file, group) for file, of_file in enumerate(rows) for group in range(len(of_file))]
        self._begins = np.cumsum([0, *(count for of_file in rows for count in of_file)])
        self._opened = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opened=threading.local())

    def read(self, rows: NDArray[np.int64]) -> list[Any]:
        return [self._cell(row) for row in rows.tolist()]

    def _cell(self, row: int) -> Any:
        place = int(np.searchsorted(self._begins, row, side="right")) - 1
        opened, (file, group) = self._opened, self._groups[place]
        try:
            if getattr(opened, "group", None) != place:
                if getattr(opened, "file", None) != file:
                    opened.file, opened.reader = file, parquet.ParquetFile(self.files[file])
                column = opened.reader.read_row_group(group, columns=[self.column], use_threads=False).column(0)
                opened.group, opened.cells = place, column
            return opened.cells[row - int(self._begins[place])].as_py()
        except (OSError, pa.ArrowException) as fault:
            raise DataError(f"{self.column}: row {row}: {self.files[file]} cannot be read any more") from fault
