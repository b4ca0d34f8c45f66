"""Tables in files: CSV and TSV, Parquet, JSON lines.

Values are taken as they are stored, so that nothing is decoded, fetched or run because a file says so. What is in a
CSV file has no type there and gets none here: a column is text at every site, whatever it happens to hold at one.
"""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Sequence
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

from tessera.worker.data.dataset import DataError

MAX_SHOWN = 300
"""Characters of a library's complaint that are passed on."""


EMPTY = "it has no rows"

Columns = tuple[Sequence[str], Callable[[str], list[Any]]]
"""The columns' names, and what gives the values of one of them."""


def _columns(rows: datasets.Dataset) -> Columns:
    return rows.column_names, lambda name: rows.data.column(name).to_pylist()


def _separated(files: Sequence[str], cache: str, separator: str) -> Columns:
    """CSV files as text in every cell, rather than as what pandas guesses that a column holds."""
    (header, *others), has_rows = zip(*(_header(file, separator) for file in files), strict=True)
    if any(other != header for other in others):
        raise ValueError("the files do not have the same columns in the same order")
    if not any(has_rows):
        raise ValueError(EMPTY)
    # Without `index_col`, the first cell of rows that all have one too many would become a name for the row; with it,
    # they are cut off with a warning.
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
    """Return the columns' names, and whether anything follows them. A column without a name, as an index that was
    written with the rest, is called by its place."""
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
    """JSON lines, each value as it is written: `datasets` makes all of a column JSON where one value is of another
    kind, and dates of text that looks like them."""
    rows = [row for file in files for row in _objects(Path(file))]
    if not rows:
        raise ValueError(EMPTY)
    return list(dict.fromkeys(name for row in rows for name in row)), lambda name: [row.get(name) for row in rows]


def _objects(file: Path) -> list[dict[str, Any]]:
    found = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as fault:
                    raise ValueError(f"line {number}: {fault.msg}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no JSON object")
                found.append(row)
    return found


READERS: dict[str, Callable[[Sequence[str], str], Columns]] = {
    ".csv": partial(_separated, separator=","),
    ".tsv": partial(_separated, separator="\t"),
    ".parquet": _parquet,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
}
"""By a file's ending. Each is told a folder for what it keeps meanwhile, and raises what `read_table` catches."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


Files = Annotated[tuple[Path, ...], BeforeValidator(_listed), Field(min_length=1, max_length=10_000)]
"""One file, or several with the same columns whose rows follow one another."""


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
        """Return the values of a column that an option names. Raises DataError if there is none called so."""
        if name not in self.names:
            there = ", ".join(self.names[:20])
            raise DataError(f"{option}: {self.where} has no column {name!r}, but {there}")
        return self._values(name)

    def texts(self, option: str, name: str) -> list[str]:
        """Return a column's values as text. Raises DataError naming the row of one that is missing, or no text or
        number."""
        values = self.column(option, name)
        for row, value in enumerate(values):
            if not isinstance(value, str | int | float):
                raise DataError(f"{option}: row {row} of {self.where} has no text in column {name!r}")
        return [str(value) for value in values]

    def groups(self, option: str, name: str) -> list[bytes]:
        """Return a column's values as the groups of the rows."""
        return [value.encode() for value in self.texts(option, name)]

    def domains(self, option: str, name: str) -> Tensor:
        """Return a column's values, numbered in their order as text, int64 [rows]."""
        return numbered_domains(self.texts(option, name))


def numbered_domains(names: list[str]) -> Tensor:
    """Return each name's place among them all in their order, int64 [names]."""
    return torch.from_numpy(np.unique(np.array(names), return_inverse=True)[1].astype(np.int64))


def read_table(option: str, files: tuple[Path, ...]) -> DataTable:
    """Raise DataError naming the option and a file that is not there, of another kind, or not what its name says."""
    for file in files:
        if not file.is_file():
            raise DataError(f"{option}: there is no file {file}")
    suffixes = {file.suffix.lower() for file in files}
    reader = READERS.get(min(suffixes)) if len(suffixes) == 1 else None
    if reader is None:
        raise DataError(f"{option}: {files[0]}: give files that all end in one of {', '.join(READERS)}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        # What is kept between calls would be a copy of the site's data in somebody's home folder.
        with TemporaryDirectory(prefix="tessera-") as cache:
            names, values = reader([str(file) for file in files], cache)
    except (DatasetsError, OSError, ValueError, csv.Error) as fault:
        told = " ".join(str(fault.__cause__ or fault).split())[:MAX_SHOWN]
        raise DataError(f"{option}: {files[0]} cannot be read: {told}") from fault
    return DataTable(files, names, values)
