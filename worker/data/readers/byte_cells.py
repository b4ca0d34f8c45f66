"""The cells of a column of bytes, such as images, in Parquet files or in a folder that `datasets` saved.

They are read from the files one at a time, so that memory does not grow with them. Loaders import this module.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc, parquet

from tessera.worker.data.readers.absent_files import in_its_form
from tessera.worker.data.readers.pictures import BrokenImage, DicomReader, Picture, Stamp, stamp_of
from tessera.worker.errors import DataError


def holds_bytes(kind: pa.DataType) -> bool:
    """Return whether cells of a type are bytes, or records with bytes, as `datasets` writes images."""
    if pa.types.is_struct(kind):
        return any(holds_bytes(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


class ByteCells(Sequence[Any]):
    """The cells of one column of several files of one format, one after the other.

    Each process, and each thread of it, opens the files of its own.
    """

    def __init__(self, files: Sequence[str], column: str, rows: Sequence[int]) -> None:
        """Describe the cells of `files`, each with a number of `rows`."""
        self.files = tuple(files)
        self.column = column
        self.begins = np.cumsum([0, *rows])
        """The first row of each file, and the number of all rows."""
        self._opened = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opened=threading.local())

    def __len__(self) -> int:
        return int(self.begins[-1])

    @overload
    def __getitem__(self, row: int) -> Any: ...
    @overload
    def __getitem__(self, row: slice) -> list[Any]: ...
    def __getitem__(self, row: int | slice) -> Any:
        """Return a cell: bytes, or a record. Raises DataError if the file cannot be read any more."""
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        file = self.file_of(row)
        try:
            return self._read(file, row - int(self.begins[file]))
        except (OSError, pa.ArrowException) as fault:
            raise DataError(f"{self.column}: row {row}: {self.files[file]} cannot be read any more") from fault

    def read(self, rows: NDArray[np.int64]) -> list[Any]:
        """Return the cells of these rows."""
        return [self[row] for row in rows.tolist()]

    def file_of(self, row: int) -> int:
        """Return the place of the file that contains a row."""
        return int(np.searchsorted(self.begins, row, side="right")) - 1

    def all_bytes(self) -> bool:
        """Return whether every cell is known to contain bytes, without reading them."""
        raise NotImplementedError

    def _read(self, file: int, row: int) -> Any:
        raise NotImplementedError


class ParquetCells(ByteCells):
    """Cells in Parquet files. A whole row group is read for each, and remembered for the next one."""

    def __init__(self, files: Sequence[str], column: str) -> None:
        described = [parquet.read_metadata(file) for file in files]
        super().__init__(files, column, [each.num_rows for each in described])
        self._groups = [
            np.cumsum([0, *(each.row_group(group).num_rows for group in range(each.num_row_groups))])
            for each in described
        ]
        """The first row of each row group of each file."""
        chunks = [
            chunk
            for each in described
            for group in range(each.num_row_groups)
            for place in range(each.num_columns)
            if (chunk := each.row_group(group).column(place)).path_in_schema in (column, f"{column}.bytes")
        ]
        self._all_bytes = all(
            chunk.statistics and chunk.statistics.has_null_count and not chunk.statistics.null_count
            for chunk in chunks
        )
        self.group_bytes = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
        """The size of the largest row group of this column."""

    def all_bytes(self) -> bool:
        return self._all_bytes

    def _read(self, file: int, row: int) -> Any:
        begins = self._groups[file]
        group = int(np.searchsorted(begins, row, side="right")) - 1
        if getattr(self._opened, "group", None) != (file, group):
            if getattr(self._opened, "file", None) != file:
                self._opened.file, self._opened.reader = file, parquet.ParquetFile(self.files[file])
            column = self._opened.reader.read_row_group(group, columns=[self.column], use_threads=False).column(0)
            self._opened.group, self._opened.cells = (file, group), column
        return self._opened.cells[row - int(begins[group])].as_py()


def parquet_cells(files: Sequence[str]) -> dict[str, ByteCells]:
    """Return the cells of each column of bytes of Parquet files with the same columns."""
    kinds = {field.name: field.type for field in parquet.read_schema(files[0])}
    return {name: ParquetCells(files, name) for name, kind in kinds.items() if holds_bytes(kind)}


class ArrowCells(ByteCells):
    """Cells in the Arrow files that `save_to_disk` of `datasets` wrote, which are mapped into memory."""

    def __init__(self, files: Sequence[str], column: str) -> None:
        super().__init__(files, column, [])
        self.begins = np.cumsum([0, *(len(self._cells(place)) for place in range(len(files)))])

    def all_bytes(self) -> bool:
        return not any(
            (chunk.field("bytes") if pa.types.is_struct(chunk.type) else chunk).null_count
            for file in range(len(self.files))
            for chunk in self._cells(file).chunks
        )

    def _read(self, file: int, row: int) -> Any:
        return self._cells(file)[row].as_py()

    def _cells(self, file: int) -> pa.ChunkedArray:
        opened = self._opened.__dict__.setdefault("files", {})
        if file not in opened:
            with ipc.open_stream(pa.memory_map(self.files[file])) as stream:
                opened[file] = stream.read_all().column(self.column)
        return opened[file]


class PictureCells:
    """Images in the cells of a table, of which some may be paths instead: relative ones begin at `folder`."""

    def __init__(self, cells: ByteCells, folder: Path, where: str, dicom: DicomReader | None = None) -> None:
        """Describe the images. `where` names the table for people. Raises DataError."""
        self.cells = cells
        self.dicom = dicom
        self.source = "\n".join([*cells.files, cells.column])
        self.keys: NDArray[Any] = np.arange(len(cells))
        self._folder = folder
        self._where = where
        self._stamps = [stamp_of(Path(file)) for file in cells.files]
        self.paths: NDArray[np.bytes_] | None = None
        """The paths of images that are not in the table, bytes [images]; None if all images are in it."""
        if not cells.all_bytes():
            paths = (path_in(cell) for cell in cells)
            self.paths = np.array([os.fsencode(in_its_form(folder, path or "")) for path in paths], np.bytes_)

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, place: int) -> Picture:
        if self.paths is not None and self.paths[place]:
            return self._folder / os.fsdecode(self.paths[place])
        cell = self.cells[place]
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if isinstance(content, bytes) and content:
            return content
        raise BrokenImage(f"image: row {place} of {self._where} has neither a path nor an image's bytes")

    def named(self, place: int) -> tuple[Path, str]:
        return self._folder, "" if self.paths is None else os.fsdecode(self.paths[place])

    def name(self, place: int) -> str:
        path = self.paths is not None and os.fsdecode(self.paths[place])
        return str(self._folder / path) if path else f"the image in row {place} of {self._where}"

    def stamp(self, place: int) -> Stamp:
        if self.paths is not None and self.paths[place]:
            return stamp_of(self._folder / os.fsdecode(self.paths[place]))
        return stamp_of(Path(self.cells.files[self.cells.file_of(place)]))

    def stamps(self) -> NDArray[np.int64]:
        found = np.repeat(np.array(self._stamps, np.int64), np.diff(self.cells.begins), axis=0)
        for place in np.flatnonzero(self.paths).tolist() if self.paths is not None else ():
            found[place] = self.stamp(place)
        return found


def path_in(cell: object) -> str | None:
    """Return a cell's path, or that in a record without bytes."""
    path = cell.get("path") if isinstance(cell, dict) and not cell.get("bytes") else cell
    return path if isinstance(path, str) else None
