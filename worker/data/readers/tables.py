"""Readers of tables: CSV and TSV, Parquet, JSON lines, and folders saved by `datasets`.

Values are read as they are stored: no content of a file makes the reader decode, fetch or run anything. CSV files
have no types, so every column is text at every site, regardless of its values.
"""

import csv
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets.exceptions import DatasetsError
from pandas.errors import ParserWarning
from pyarrow import ArrowException, parquet
from pydantic import BeforeValidator, Field
from torch import Tensor

from tessera.worker.data.dataset import DataError, in_short
from tessera.worker.data.readers.byte_cells import ArrowCells, ByteCells, ParquetCells, holds_bytes
from tessera.worker.data.readers.table_files import is_saved, saved_split, table_files

EMPTY = "it has no rows"


class Columns(NamedTuple):
    names: Sequence[str]
    values: Callable[[str], Sequence[Any]]
    """A function from a column's name to its values; those of a column of bytes are read one by one."""
    classes: Mapping[str, tuple[str, ...]] = {}
    """The names of the classes, by the column whose type, a `ClassLabel` of `datasets`, lists them."""


def _columns(rows: datasets.Dataset, cells: Mapping[str, ByteCells]) -> Columns:
    """Return the columns, with the names of classes in place of numbers, and those of `cells`, which are bytes."""
    types = {name: _class_label(feature) for name, feature in rows.features.items()}
    classes = {name: tuple(classes.names) for name, classes in types.items() if classes}

    def values(name: str) -> Sequence[Any]:
        if name in cells:
            return cells[name]
        found = rows.data.column(name).to_pylist()
        return [_class_names(value, classes[name]) for value in found] if name in classes else found

    return Columns([*dict.fromkeys([*rows.column_names, *cells])], values, classes)


def _class_label(feature: object) -> datasets.ClassLabel | None:
    """Return the type of the classes in a column of classes or of lists of classes."""
    of_item = getattr(feature, "feature", feature)
    return of_item if isinstance(of_item, datasets.ClassLabel) and of_item.names else None


def _class_names(value: Any, names: tuple[str, ...]) -> Any:
    """Return the name of a class, or of each of a list; None for a number without one, such as -1."""
    if isinstance(value, list):
        return [_class_names(item, names) for item in value]
    return names[value] if value is not None and 0 <= value < len(names) else None


def _separated(files: Sequence[str], cache: str, separator: str) -> Columns:
    """Return the columns of CSV files with text in every cell; pandas would guess types."""
    (header, *others), has_rows = zip(*(_header(file, separator) for file in files), strict=True)
    if any(other != header for other in others):
        raise ValueError("the files do not have the same columns in the same order")
    if not any(has_rows):
        raise ValueError(EMPTY)
    # If all rows have one cell too many, pandas makes the first cell an index. With `index_col=False` it cuts off the
    # last one and warns.
    with warnings.catch_warnings(action="error", category=ParserWarning):
        rows = datasets.Dataset.from_csv(
            list(files),
            features=datasets.Features(dict.fromkeys(header, datasets.Value("large_string"))),
            cache_dir=cache,
            keep_in_memory=True,
            sep=separator,
            names=header,
            header=0,
            index_col=False,
            keep_default_na=False,
        )
    return _columns(rows, {})


def _header(file: str, separator: str) -> tuple[list[str], bool]:
    """Return the columns' names, by position where there is none (a stored index), and whether rows follow."""
    with Path(file).open(encoding="utf-8-sig", newline="") as lines:
        names = next(filter(None, csv.reader(lines, delimiter=separator)), [])
        has_rows = any(map(str.strip, lines))
    if not names:
        raise ValueError("it is empty")
    if len(names) == 1 and (other := next((mark for mark in ";\t|," if mark in names[0]), None)):
        raise ValueError(f"its columns are separated by {other!r}, not {separator!r}: save it with {separator!r}")
    return [name or f"column {place}" for place, name in enumerate(names)], has_rows


def _parquet(files: Sequence[str], cache: str) -> Columns:
    if not any(parquet.read_metadata(file).num_rows for file in files):
        raise ValueError(EMPTY)
    schema = parquet.read_schema(files[0])
    first = schema.names
    for file in files[1:]:
        # Of a column that is not in all files, `datasets` makes one with empty cells, or fails, by their order.
        if lone := sorted(set(first).symmetric_difference(parquet.read_schema(file).names)):
            raise ValueError(f"it and {Path(file).name} differ in columns: only one of them has {', '.join(lone)}")
    cells = {name: ParquetCells(files, name) for name in first if holds_bytes(schema.field(name).type)}
    others = [name for name in first if name not in cells]
    read = partial(datasets.Dataset.from_parquet, list(files), cache_dir=cache, keep_in_memory=True)
    # Without columns it would read all.
    rows = read(columns=others) if others else datasets.Dataset.from_dict({})
    return _columns(rows, cells)._replace(names=first)


def _json_lines(files: Sequence[str], cache: str) -> Columns:  # noqa: ARG001 (it needs none)
    """Return the columns of JSON lines, with each value as it is written. `datasets` would convert columns of mixed
    types to JSON, and text that looks like a date to a date."""
    rows = [row for file in files for row in _objects(Path(file))]
    if not rows:
        raise ValueError(EMPTY)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Columns(names, lambda name: [row.get(name) for row in rows])


def _saved(folders: Sequence[str], cache: str) -> Columns:  # noqa: ARG001 (it needs none)
    """Return the columns of the folder that `save_to_disk` of `datasets` made. Values are not decoded."""
    # The library saves a data set without rows, but cannot load it.
    if not json.loads((Path(folders[0]) / "state.json").read_text(encoding="utf-8"))["_data_files"]:
        raise ValueError(EMPTY)
    rows = datasets.Dataset.load_from_disk(folders[0])
    files = [entry["filename"] for entry in rows.cache_files]
    kinds = {field.name: field.type for field in rows.data.schema}
    return _columns(rows, {name: ArrowCells(files, name) for name, kind in kinds.items() if holds_bytes(kind)})


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as fault:
                    raise ValueError(f"line {number}: {fault.msg}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                yield row


Reader = Callable[[Sequence[str], str], Columns]
"""A function from the files and a folder for temporary files to their columns."""

READERS: dict[str, Reader] = {
    ".csv": partial(_separated, separator=","),
    ".tsv": partial(_separated, separator="\t"),
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
}
"""Readers by a file's suffix."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


Files = Annotated[tuple[Path, ...], BeforeValidator(_listed), Field(min_length=1, max_length=10_000)]
"""One table, or several with the same columns, whose rows are concatenated: files, patterns or folders of shards."""


@dataclass(frozen=True)
class DataTable:
    """The rows of one or several files, or of a folder that `datasets` saved."""

    files: tuple[Path, ...]
    columns: Columns
    ignored_files: Mapping[str, int]
    """The number of other files in folders of shards, by suffix."""

    @property
    def where(self) -> str:
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    def column(self, option: str, name: str) -> Sequence[Any]:
        """Return the values of the column that an option names. Raises DataError if there is no such column."""
        if name not in self.columns.names:
            there = ", ".join(self.columns.names[:20])
            raise DataError(f"{option}: {self.where} has no column {name!r}; its columns are {there}")
        return self.columns.values(name)

    @property
    def folder(self) -> Path:
        """The folder from which relative paths in the table begin."""
        return self.files[0] if self.files[0].is_dir() else self.files[0].parent

    def texts(self, option: str, name: str) -> list[str]:
        """Return a column's values as text. Raises DataError, naming the row, if one is not text or a number."""
        values = self.column(option, name)
        for row, value in enumerate(values):
            if not isinstance(value, str | int | float):
                raise DataError(f"{option}: row {row} of {self.where} has no text in column {name!r}")
        return [str(value) for value in values]

    def groups(self, name: str | None) -> list[bytes] | None:
        """Return the values of the column that the option `group` names, if it is set, as the groups of the rows."""
        return None if name is None else [value.encode() for value in self.texts("group", name)]

    def domains(self, name: str | None) -> Tensor | None:
        """Return the values of the column that the option `domain` names, if it is set, numbered in alphabetical
        order, int64 [rows]."""
        return None if name is None else numbered_domains(self.texts("domain", name))


def numbered_domains(names: list[str]) -> Tensor:
    """Return the position of each name among the sorted distinct names, int64 [names]."""
    return torch.from_numpy(np.unique(np.array(names), return_inverse=True)[1].astype(np.int64))


def read_table(option: str, named: tuple[Path, ...], split: str | None = None) -> DataTable:
    """Return the rows of the files, patterns or folders that an option names.

    Raises DataError, naming the option, if one is missing, unreadable or unknown, or if the split is not clear.
    """
    reader: Reader = _saved
    ignored: Counter[str] = Counter()
    files: tuple[Path, ...]
    if any(map(is_saved, named)):
        if len(named) > 1:
            raise DataError(f"{option}: {named[0]} and others: a folder saved by `datasets` must be the only one")
        files = (saved_split(option, named[0], split),)
    else:
        files, ignored = table_files(option, named, split, READERS)
        reader = _reader_of(option, files)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        # Without it, the library would keep a copy of the site's data in a home folder.
        with TemporaryDirectory(prefix="tessera-") as cache:
            columns = reader([str(file) for file in files], cache)
    except (DatasetsError, OSError, ValueError, LookupError, TypeError, csv.Error) as fault:
        cause = fault.__cause__ or fault
        reason = "it is damaged" if isinstance(cause, ArrowException) else in_short(cause)
        raise DataError(f"{option}: {files[0]} cannot be read: {reason}; correct it, or name another") from fault
    return DataTable(files, columns, ignored)


def _reader_of(option: str, files: tuple[Path, ...]) -> Reader:
    suffixes = {file.suffix.lower() for file in files}
    if len(suffixes) == 1 and (reader := READERS.get(min(suffixes))):
        return reader
    if is_saved(files[0].parent):
        raise DataError(
            f"{option}: {files[0]} belongs to a folder saved by `datasets`: name {files[0].parent} instead"
        )
    raise DataError(f"{option}: {files[0]}: all files must end in one of {', '.join(READERS)}")
