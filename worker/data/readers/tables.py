"""Readers of tables: CSV and TSV, Parquet, JSON lines, and folders saved by `datasets`.

Values are read as they are stored: no content of a file makes the reader decode, fetch or run anything. CSV files
have no types, so every column is text at every site, regardless of its values. Rows are mapped from Arrow files, so
that memory does not grow with them.
"""

import csv
import errno
import hashlib
import importlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, BinaryIO, get_args

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pandas.errors import ParserWarning
from pyarrow import parquet
from pydantic import BeforeValidator, Field
from torch import Tensor

from tessera.shared.near_names import composed, nearest
from tessera.worker.data.cells import ByteCells, Cells
from tessera.worker.data.groups import RepeatedName, Subgroups, group_name, is_identifier, is_unnamed, repeated
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder, mapped
from tessera.worker.data.readers.arrow_rows import ArrowRows, write_rows, written_rows
from tessera.worker.data.readers.byte_cells import byte_cells
from tessera.worker.data.readers.pictures import Stamp, stamp_of
from tessera.worker.data.readers.table_files import Separator, TableFiles, is_saved, saved_split, table_files
from tessera.worker.errors import DataChanged, DataError, in_short

ROWS_AT_ONCE = 1000
EMPTY = "it has no rows"
MAX_CELL_CHARACTERS = 1 << 24
"""Length of a cell in a CSV file above which its quotation mark is hardly closed: the rest of a file would be read
into memory."""
JSON_CELLS = {b"tessera.cells": b"json"}
"""The metadata of a table of JSON lines, whose cells are text in JSON."""
FORMAT = 5
"""The number of the way in which tables are converted, which is part of their files' names."""
EXCEL = re.compile('"?sep=.?"?[;,|\t]*\r?$', re.IGNORECASE | re.MULTILINE)
"""The line that names the separator of a CSV file to Excel."""
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, csv.Error)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _features(schema: pa.Schema) -> Mapping[str, Any]:
    """Return the types in `datasets` of the columns of a file that the library wrote; none of another file."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return metadata.get("info", {}).get("features") or {}


def _class_names_by_column(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: names for name, feature in features.items() if (names := _class_label(feature))}


def _class_label(feature: Any) -> tuple[str, ...]:
    """Return the names of the classes in a column of them or of lists of them, from its type in `datasets`."""
    while isinstance(feature, list) and feature:
        feature = feature[0]
    of_item = feature.get("feature", feature) if isinstance(feature, dict) else None
    return tuple(of_item.get("names") or ()) if isinstance(of_item, dict) else ()


def _class_names(value: Any, names: tuple[str, ...]) -> Any:
    """Return the name of a class, or of each of a list; None for a number without one, such as -1."""
    if isinstance(value, list):
        return [_class_names(item, names) for item in value]
    return names[value] if value is not None and 0 <= value < len(names) else None


def _library() -> Any:
    """Return `datasets`, whose import takes a second that a table which was converted before does not need."""
    library: Any = importlib.import_module("datasets")
    library.disable_progress_bars()
    library.logging.set_verbosity(library.logging.CRITICAL)
    return library


def _cached(rows: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the files that `datasets` wrote, which are read one at a time and not mapped."""
    for each in rows.cache_files:
        with pa.OSFile(each["filename"]) as file:
            yield from pa.ipc.open_stream(file)


def _separated(files: Sequence[str], cache: str, separator: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of CSV files with text in every cell; pandas would guess types."""
    (header, *others), has_rows = zip(*(_header(file, separator) for file in files), strict=True)
    if any(other != header for other in others):
        raise ValueError("the files do not have the same columns in the same order")
    if not any(has_rows):
        raise ValueError(EMPTY)
    # From one quotation mark that is not closed to the next, pandas makes one row of several without a word.
    _refuse_malformed(files, separator, len(header))
    library = _library()
    # If all rows have one cell too many, pandas makes the first cell an index. With `index_col=False` it cuts off the
    # last one and warns.
    with warnings.catch_warnings(action="error", category=ParserWarning):
        rows = library.Dataset.from_csv(
            list(files),
            features=library.Features(dict.fromkeys(header, library.Value("large_string"))),
            cache_dir=cache,
            sep=separator,
            names=header,
            header=0,
            index_col=False,
            keep_default_na=False,
        )
    yield from _cached(rows)


def _refuse_malformed(files: Sequence[str], separator: str, columns: int) -> None:
    """Raise ValueError for the first row that does not fit, with its file and line. Of a file, memory holds a row."""
    # Python's own limit, 131,072 characters, is less than a long document. It holds for the whole process.
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    for file in files:
        line = 1
        with Path(file).open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines, delimiter=separator, strict=True)
            try:
                for cells in rows:
                    # Of a blank line, which pandas leaves out, it yields none.
                    if cells and len(cells) != columns:
                        raise ValueError(
                            f"line {line} of {Path(file).name} has {len(cells)} cells for {columns} columns: put "
                            f"a text that contains {separator!r} or a line break in quotation marks; complete a row "
                            "that is too short"
                        )
                    line = rows.line_num + 1
            except csv.Error as fault:
                if "field limit" in str(fault):
                    raise ValueError(
                        f"the row that begins in line {line} of {Path(file).name} has a cell of more than "
                        f"{MAX_CELL_CHARACTERS:,} characters: close its quotation mark, or shorten it"
                    ) from None
                raise ValueError(
                    f"line {line} of {Path(file).name} has a quotation mark that is not closed, or stands in a "
                    "quoted text: write it twice there"
                ) from None


def _header(file: str, separator: str) -> tuple[list[str], bool]:
    """Return the columns' names, by position where there is none (a stored index), and whether rows follow."""
    with Path(file).open(encoding="utf-8-sig", newline="") as lines:
        if mark := EXCEL.match(lines.readline()):
            raise DataError(
                f"file: line 1 of {file} is Excel's {mark[0].strip()!r}, not the columns' names: remove the line, "
                f"and name the character in separator if it is not {separator!r}"
            )
        lines.seek(0)
        names = next(filter(None, csv.reader(lines, delimiter=separator)), [])
        has_rows = any(map(str.strip, lines))
    if not names:
        raise ValueError("it is empty")
    others = [mark for mark in get_args(Separator) if mark != separator and mark in names[0]]
    if len(names) == 1 and others:
        raise DataError(
            f"separator: the columns of {file} are separated by {others[0]!r}, not {separator!r}: set separator = "
            f"{json.dumps(others[0])}"
        )
    names = [name or f"column {place}" for place, name in enumerate(names)]
    _require_distinct(names)
    return names, has_rows


def _require_distinct(names: Iterable[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"several columns are called {', '.join(map(repr, twice))}: rename all but one")


def separator_of(file: Path, rows: int) -> Separator | None:
    """Return the separator that divides each of the first rows into as many columns, more than one; None if none or
    several do."""
    widths = {mark: _widths(file, mark, rows) for mark in get_args(Separator)}
    fitting = [mark for mark, counts in widths.items() if len(counts) == 1 and min(counts) > 1]
    return fitting[0] if len(fitting) == 1 else None


def _widths(file: Path, separator: str, rows: int) -> set[int]:
    """Return the numbers of columns of the first rows; none if they cannot be read with this separator."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            return set(map(len, islice(filter(None, csv.reader(lines, delimiter=separator)), rows)))
    except (csv.Error, UnicodeDecodeError):
        return set()


def _parquet(files: Sequence[str], cache: str) -> Iterator[pa.RecordBatch]:  # noqa: ARG001 (it needs none)
    if not any(parquet.read_metadata(file).num_rows for file in files):
        raise ValueError(EMPTY)
    first = parquet.read_schema(files[0])
    for file in files[1:]:
        schema = parquet.read_schema(file)
        # Of a column that is not in all files, `datasets` makes one with empty cells, or fails, by their order.
        if lone := sorted(set(first.names).symmetric_difference(schema.names)):
            raise ValueError(f"it and {Path(file).name} differ in columns: only one of them has {', '.join(lone)}")
        _require_same_classes(first, schema, Path(file).name)
    # Images are not converted, but read from these files.
    others = [name for name in first.names if name not in byte_cells([*map(Path, files)], None)] or None
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE, columns=others):
            kinds = pa.schema([first.field(name) for name in batch.schema.names], first.metadata)
            if batch.schema.equals(kinds):
                yield batch.replace_schema_metadata(first.metadata)
            else:
                # Names of classes may be written as text in one file and as numbers in another.
                yield from _library().table.table_cast(pa.Table.from_batches([batch]), kinds).to_batches()


def _require_same_classes(first: pa.Schema, schema: pa.Schema, file: str) -> None:
    """Raise ValueError if a number stands for one class in the first file and for another, or none, in this one:
    `datasets` would give the numbers of all files the names in the first."""
    expected, found = (_class_names_by_column(_features(each)) for each in (first, schema))
    for name in sorted(expected.keys() | found.keys()):
        # Classes that are written as text have the right names, whatever the first file's numbers are.
        as_text = name in expected and name not in found and not _holds_numbers(schema.field(name).type)
        if expected.get(name) != found.get(name) and not as_text:
            raise ValueError(
                f"it and {file} have different class names for the numbers in column {name!r}: write both with one "
                "ClassLabel"
            )


def _holds_numbers(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_primitive(kind))


def _json_lines(files: Sequence[str], cache: str) -> Iterator[pa.RecordBatch]:  # noqa: ARG001 (it needs none)
    """Yield the rows of JSON lines, with each value as it is written, in JSON. `datasets` would convert columns of
    mixed types to JSON, and text that looks like a date to a date."""
    names = list(dict.fromkeys(name for file in files for row in _objects(Path(file)) for name in row))
    schema = pa.schema([(name, pa.large_string()) for name in names], metadata=JSON_CELLS)
    objects = (row for file in files for row in _objects(Path(file)))
    yielded = False
    while rows := list(islice(objects, ROWS_AT_ONCE)):
        cells = [[json.dumps(row[name]) if name in row else None for row in rows] for name in names]
        yield pa.record_batch([pa.array(of_column, pa.large_string()) for of_column in cells], schema=schema)
        yielded = True
    if not yielded:
        raise ValueError(EMPTY)


def _saved(folder: Path) -> tuple[list[Path], Mapping[str, Any]]:
    """Return the Arrow files of the folder that `save_to_disk` of `datasets` made, and the types of the columns."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if not state["_data_files"]:
        raise ValueError(EMPTY)
    if indices := state.get("_indices_data_files"):
        file = folder / indices[0]["filename"]
        kept = f'pyarrow.ipc.open_stream({str(file)!r}).read_all()["indices"].to_pylist()'
        raise DataError(
            f"file: {folder} is of an early version of `datasets`, with all rows, and the numbers of those that were "
            f"kept in {file.name}: save these, in Python: load_from_disk({str(folder)!r}).select({kept})"
            '.save_to_disk("NEW")'
        )
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    return [folder / each["filename"] for each in state["_data_files"]], info["features"] or {}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a name that occurs twice, of which `json` would keep the last."""
    _require_distinct(name for name, _ in pairs)
    return dict(pairs)


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line, object_pairs_hook=_object)
                except ValueError as fault:
                    reason = fault.msg if isinstance(fault, json.JSONDecodeError) else fault
                    raise ValueError(f"line {number}: {reason}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not a JSON object")
                yield row


Reader = Callable[[Sequence[str], str], Iterator[pa.RecordBatch]]
"""A function from the files and a folder for temporary files to their rows."""

SEPARATORS: dict[str, Separator] = {".csv": ",", ".tsv": "\t"}
"""The separator of a file's columns by its suffix, unless an option names another."""

READERS: dict[str, Reader] = {
    **{suffix: partial(_separated, separator=separator) for suffix, separator in SEPARATORS.items()},
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
    rows: ArrowRows
    names: Sequence[str]
    classes: Mapping[str, tuple[str, ...]]
    """The names of the classes, by the column whose type, a `ClassLabel` of `datasets`, lists them."""
    other_files: Sequence[Path]
    """The files in folders of shards that are no tables."""
    passed_over: Mapping[str, int]
    """The number of files and folders there that systems and programs left, by name."""
    digest: str
    """A digest of the files' paths, sizes and times of change, and of the separator that an option names."""
    check: Callable[[], None]
    """A function that raises DataError if a file has changed."""
    bytes_of: Mapping[str, ByteCells]
    """The columns of bytes, such as images, whose cells are read from the files one by one."""

    @property
    def examples(self) -> int:
        return len(self.rows)

    @property
    def where(self) -> str:
        return str(self.files[0]) if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    def cells(self, option: str, name: str) -> Cells[Any]:
        """Return the values of the column that an option names. Raises DataError if there is no such column."""
        own = self.own_name(name)
        if own is None:
            near = nearest(name, self.names)
            there = f"did you mean `{near}`?" if near else f"its columns are {', '.join(self.names[:20])}"
            raise DataError(f"{option}: {self.where} has no column {name!r}; {there}")
        read = self.bytes_of[own].read if own in self.bytes_of else partial(self._values, own)
        return Cells(read, np.arange(self.examples))

    def _values(self, name: str, places: NDArray[np.int64]) -> list[Any]:
        """Return a column's values in some rows, with the names of classes in place of numbers."""
        self.check()
        try:
            values = self.rows.values(name, places)
        except pa.ArrowException as fault:
            raise DataError(f"file: column {name!r} cannot be read: {in_short(fault)}; save it as text") from fault
        if JSON_CELLS.items() <= (self.rows.schema.metadata or {}).items():
            return [None if cell is None else json.loads(cell) for cell in values]
        classes = self.classes.get(name)
        return [_class_names(value, classes) for value in values] if classes else values

    def own_name(self, name: str) -> str | None:
        """Return the table's name of a column; None if there is none. Spaces around a name and its Unicode form do
        not count, unless that leaves several."""
        like = [own for own in self.names if composed(own).strip() == composed(name).strip()]
        return name if name in like else like[0] if len(like) == 1 else None

    def class_names(self, name: str) -> tuple[str, ...] | None:
        """Return the names of a column's classes, if its type lists them."""
        return self.classes.get(self.own_name(name) or name)

    def byte_cells(self, name: str) -> ByteCells | None:
        """Return the cells of a column of bytes; None for a column of another type."""
        return self.bytes_of.get(self.own_name(name) or name)

    def column(self, option: str, name: str) -> list[Any]:
        """Return the same values, all in memory."""
        return list(self.cells(option, name))

    @property
    def folder(self) -> Path:
        """The folder from which relative paths in the table begin."""
        return self.files[0] if self.files[0].is_dir() else self.files[0].parent

    def texts(self, option: str, name: str) -> Cells[str]:
        """Return a column's values as text. Reading raises DataError, naming the row, for one that is not text or a
        number."""
        cells = self.cells(option, name)

        def read(rows: NDArray[np.int64]) -> list[str]:
            values = cells.read(rows)
            for row, value in zip(rows.tolist(), values, strict=True):
                if not isinstance(value, str | int | float) or (option == "text" and value != value):
                    raise DataError(f"{option}: row {row} of {self.where} has no text in column {name!r}")
            return [str(value) for value in values]

        return Cells(read, cells.rows)

    def groups(self, name: str | None) -> Cells[bytes] | None:
        """Return the values of the column that the option `group` names, if it is set, as the groups of the rows."""
        if name is None:
            return None
        texts = self.texts("group", name)
        for _ in texts:
            # A row without a group is refused now.
            pass
        return texts.mapped(group_name)

    def subgroups(self, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Subgroups]:
        """Return the columns that the option `subgroups` names, with the values that it names."""
        return {name: Subgroups.of(values, self.cells("subgroups", name)) for name, values in wanted.items()}

    def without_group(self, name: str | None) -> int:
        """Return the number of rows whose group is missing."""
        return sum(map(is_unnamed, self.groups(name) or ()))

    def ungrouped(self, group: str | None, *others: str | None) -> list[RepeatedName]:
        """Return the columns but these that identify persons by their names, and repeat; none if there is a group."""
        used = {self.own_name(other) for other in others if other}
        names = [] if group else [name for name in self.names if name not in used and is_identifier(name)]
        found = (
            repeated(f"column {name!r}", self.cells("group", name), f"Set group = {json.dumps(name)} if it is.")
            for name in names
        )
        return list(filter(None, found))

    def domains(self, name: str | None) -> Tensor | None:
        """Return the values of the column that the option `domain` names, if it is set, numbered in alphabetical
        order, int64 [rows]."""
        return None if name is None else numbered_domains(self.texts("domain", name))


def numbered_domains(names: Iterable[str]) -> Tensor:
    """Return the position of each name among the sorted distinct names, int64 [names]."""
    first: dict[str, int] = {}
    numbers = np.fromiter((first.setdefault(name, len(first)) for name in map(composed, names)), np.int64)
    position = {name: place for place, name in enumerate(sorted(first))}
    return torch.from_numpy(np.array([position[name] for name in first], np.int64)[numbers])


def read_table(
    option: str,
    named: tuple[Path, ...],
    split: str | None = None,
    prepared: PreparedFolder = NOT_KEPT,
    separator: Separator | None = None,
) -> DataTable:
    """Return the rows of the files, patterns or folders that an option names, memory-mapped. Other files than Arrow's
    are converted once, in `prepared`. `separator` is the separator of CSV files, if their suffix does not say it.

    Raises DataError, naming the option, if one is missing, unreadable or unknown, or if the split is not clear.
    """
    reader: Reader | None = None
    if any(map(is_saved, named)):
        if len(named) > 1:
            raise DataError(f"{option}: {named[0]} and others: a folder saved by `datasets` must be the only one")
        listed = TableFiles((saved_split(option, named[0], split),))
    else:
        listed = table_files(option, named, split, READERS)
        reader = _reader_of(option, listed.files)
    files = listed.files
    if separator is not None:
        if reader is None or files[0].suffix.lower() not in SEPARATORS:
            raise DataError(f"separator: {files[0]} is not a CSV file: leave separator out")
        reader = partial(_separated, separator=separator)
    try:
        stored, features = (list(files), None) if reader else _saved(files[0])
        stamps = {file: stamp_of(file) for file in stored}
        content = [[str(file.absolute()), *stamp] for file, stamp in stamps.items()]
        digest = digest_of([FORMAT, content, *filter(None, [separator])])
        if reader:
            write = partial(_convert, reader, files, prepared)
            rows = prepared.file(table_name(digest), write, written_rows)
        else:
            rows = ArrowRows(list(map(mapped, stored)))
        bytes_of = byte_cells(stored, None if reader else rows) if reader in (None, _parquet) else {}
        names = parquet.read_schema(stored[0]).names if reader is _parquet else rows.schema.names
        _require_distinct(names)
    except DataError:
        raise
    except Exception as fault:
        # `datasets` has an error of its own for each of these, and is imported only where it is needed.
        if not isinstance(fault, UNREADABLE) and type(fault).__module__ != "datasets.exceptions":
            raise
        raise _unreadable(option, files[0], fault) from fault
    check = partial(_require_same, option, stamps)
    classes = _class_names_by_column(_features(rows.schema) if features is None else features)
    return DataTable(files, rows, names, classes, listed.others, listed.passed_over, digest, check, bytes_of)


def table_name(digest: str) -> str:
    """Return the name of the file of a converted table."""
    return f"table-{digest}.arrow"


def digest_of(content: object) -> str:
    """Return a short digest of a JSON document, for the name of a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _unreadable(option: str, file: Path, fault: Exception) -> DataError:
    cause = fault.__cause__ or fault
    if isinstance(cause, OSError) and cause.errno in FULL:
        return disk_full(option, str(file), cause)
    if isinstance(cause, UnicodeDecodeError):
        return DataError(
            f"{option}: {file} cannot be read: its texts are not UTF-8; save it as UTF-8, or name another"
        )
    damaged = isinstance(cause, pa.ArrowException) and not isinstance(cause, pa.ArrowNotImplementedError)
    reason = "it is damaged" if damaged else in_short(cause)
    return DataError(f"{option}: {file} cannot be read: {reason}; correct it, or name another")


def disk_full(option: str, what: str, fault: OSError) -> DataError:
    """Return the error for a disk without room for the files made of a table."""
    return DataError(
        f"{option}: {what} cannot be converted: {fault.strerror or fault}: make room where state_dir is (or, "
        "without a worker's settings, the folder for temporary files)"
    )


def _convert(reader: Reader, files: Sequence[Path], prepared: PreparedFolder, file: BinaryIO) -> None:
    """Write the rows as one Arrow stream."""
    # Without a folder, the library would keep a copy of the site's data in a home folder.
    with TemporaryDirectory(prefix="tessera-", dir=prepared.scratch) as cache:
        write_rows(file, reader([str(file) for file in files], cache))


def _require_same(option: str, stamps: Mapping[Path, Stamp]) -> None:
    for file, stamp in stamps.items():
        if stamp_of(file) != stamp:
            raise DataChanged(f"{option}: {file} has changed since the worker started; restart it")


def _reader_of(option: str, files: tuple[Path, ...]) -> Reader:
    suffixes = {file.suffix.lower() for file in files}
    if len(suffixes) == 1 and (reader := READERS.get(min(suffixes))):
        return reader
    if is_saved(files[0].parent):
        raise DataError(
            f"{option}: {files[0]} belongs to a folder saved by `datasets`: name {files[0].parent} instead"
        )
    raise DataError(
        f"{option}: {files[0]}: all files must end in one of {', '.join(READERS)}; save a spreadsheet as CSV (UTF-8)"
    )
