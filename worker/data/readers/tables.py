"""Readers of tables in files: CSV and TSV, Parquet, JSON lines.

Values are read as they are stored: no content of a file makes the reader decode, fetch or run anything. CSV files
have no types, so every column is text at every site, regardless of its values.
"""

import csv
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import datasets
import numpy as np
import torch
from datasets.exceptions import DatasetsError
from pandas.errors import ParserWarning
from pyarrow import parquet
from pydantic import BeforeValidator, Field
from torch import Tensor

from tessera.worker.data.dataset import DataError, in_short

EMPTY = "it has no rows"

Columns = tuple[Sequence[str], Callable[[str], list[Any]]]
"""The names of the columns, and a function from a name to the column's values."""


def _columns(rows: datasets.Dataset) -> Columns:
    return rows.column_names, lambda name: rows.data.column(name).to_pylist()


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
    return _columns(rows)


def _header(file: str, separator: str) -> tuple[list[str], bool]:
    """Return the columns' names, by position where there is none (a stored index), and whether rows follow."""
    with Path(file).open(encoding="utf-8-sig", newline="") as lines:
        names = next(filter(None, csv.reader(lines, delimiter=separator)), [])
        has_rows = any(map(str.strip, lines))
    if not names:
        raise ValueError("it is empty")
    return [name or f"column {place}" for place, name in enumerate(names)], has_rows


def _parquet(files: Sequence[str], cache: str) -> Columns:
    if not any(parquet.read_metadata(file).num_rows for file in files):
        raise ValueError(EMPTY)
    return _columns(datasets.Dataset.from_parquet(list(files), cache_dir=cache, keep_in_memory=True))


def _json_lines(files: Sequence[str], cache: str) -> Columns:  # noqa: ARG001 (it needs none)
    """Return the columns of JSON lines, with each value as it is written. `datasets` would convert columns of mixed
    types to JSON, and text that looks like a date to a date."""
    rows = [row for file in files for row in _objects(Path(file))]
    if not rows:
        raise ValueError(EMPTY)
    return list(dict.fromkeys(name for row in rows for name in row)), lambda name: [row.get(name) for row in rows]


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


READERS: dict[str, Callable[[Sequence[str], str], Columns]] = {
    ".csv": partial(_separated, separator=","),
    ".tsv": partial(_separated, separator="\t"),
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
}
"""Readers by a file's suffix. Each takes the files and a folder for temporary files."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


Files = Annotated[tuple[Path, ...], BeforeValidator(_listed), Field(min_length=1, max_length=10_000)]
"""One file, or several with the same columns, whose rows are concatenated."""


@dataclass(frozen=True)
class DataTable:
    """The rows of one or several files."""

    files: tuple[Path, ...]
    names: Sequence[str]
    _values: Callable[[str], list[Any]]

    @property
    def where(self) -> str:
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    def column(self, option: str, name: str) -> list[Any]:
        """Return the values of the column that an option names. Raises DataError if there is no such column."""
        if name not in self.names:
            there = ", ".join(self.names[:20])
            raise DataError(f"{option}: {self.where} has no column {name!r}; its columns are {there}")
        return self._values(name)

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


def read_table(option: str, files: tuple[Path, ...]) -> DataTable:
    """Return the rows of the files. Raises DataError, naming the option, if one is missing, unreadable or unknown."""
    for file in files:
        if not file.is_file():
            raise DataError(f"{option}: there is no file {file}")
    suffixes = {file.suffix.lower() for file in files}
    reader = READERS.get(min(suffixes)) if len(suffixes) == 1 else None
    if reader is None:
        raise DataError(f"{option}: {files[0]}: all files must end in one of {', '.join(READERS)}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        # Without it, the library would keep a copy of the site's data in a home folder.
        with TemporaryDirectory(prefix="tessera-") as cache:
            names, values = reader([str(file) for file in files], cache)
    except (DatasetsError, OSError, ValueError, csv.Error) as fault:
        raise DataError(f"{option}: {files[0]} cannot be read: {in_short(fault.__cause__ or fault)}") from fault
    return DataTable(files, names, values)
