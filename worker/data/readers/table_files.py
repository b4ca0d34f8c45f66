"""The files of a table: listed, matched by a pattern, or the shards in a folder; and folders saved by `datasets`."""

import json
import re
from collections import Counter
from collections.abc import Collection
from glob import glob
from pathlib import Path
from typing import Literal

from pydantic import Field

from tessera.shared.near_names import absent
from tessera.worker.data.dataset import DataError, Options
from tessera.worker.data.readers.class_labels import Absent, Names

SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"})
"""The names that files of different splits usually have."""

Separator = Literal[",", ";", "\t", "|"]
"""The character between the columns of a CSV file."""

MAX_SHOWN = 8

_SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")
_DICT, _STATE = "dataset_dict.json", "state.json"


class TableOptions(Options):
    """The options of the kinds whose examples a table may list."""

    split: str | None = Field(default=None, description="the split, if `file` is a folder with several")
    separator: Separator | None = Field(
        default=None, description="the character between the columns of a CSV file; unset, a comma, and in .tsv a tab"
    )
    labels: Names | None = Field(
        default=None, description="the classes' names in order; unset, the table's own, or labels are numbers"
    )
    absent: Absent | None = Field(
        default=None, description="the names in `labels` of which this site has no example, or `any`"
    )
    domain: str | None = Field(default=None, description="column: the example's origin")
    group: str | None = Field(default=None, description="column: equal values are held out together (the patient)")


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` made the folder."""
    return (folder / _DICT).is_file() or (folder / _STATE).is_file()


def saved_split(option: str, folder: Path, split: str | None) -> Path:
    """Return the folder of one split of a saved folder: itself if it has no splits. Raises DataError."""
    if not (folder / _DICT).is_file():
        if split is not None:
            raise DataError(f"split: {folder} is a single split: leave split out")
        return folder
    try:
        splits = sorted(map(str, json.loads((folder / _DICT).read_text(encoding="utf-8"))["splits"]))
    except (OSError, ValueError, LookupError, TypeError) as fault:
        raise DataError(f"{option}: {folder / _DICT} cannot be read: save the folder again") from fault
    return folder / _chosen(folder, splits, split)


def table_files(
    option: str, named: tuple[Path, ...], split: str | None, suffixes: Collection[str]
) -> tuple[tuple[Path, ...], Counter[str]]:
    """Return the files that paths, patterns and folders of shards stand for, and the number of other files in the
    folders, by suffix. Raises DataError."""
    files: list[Path] = []
    others: Counter[str] = Counter()
    for path in named:
        if path.is_dir():
            there = sorted(file for file in path.iterdir() if file.is_file() and file.name[0] not in "._")
            tables = [file for file in there if file.suffix.lower() in suffixes]
            if not tables:
                inside = ", ".join(sorted(file.name for file in path.iterdir())[:MAX_SHOWN]) or "nothing"
                kinds = ", ".join(suffixes)
                raise DataError(
                    f"{option}: the folder {path} contains no table ({kinds}); it contains {inside}: name another"
                )
            others.update(file.suffix.lower() or "without suffix" for file in there if file not in tables)
            files += _of_split(path, tables, split)
        elif path.is_file():
            files.append(path)
        elif matched := sorted(glob(str(path), recursive=True)):  # noqa: PTH207 (a pattern may be absolute)
            files += map(Path, matched)
        else:
            raise DataError(f"{option}: {absent(path)}")
    _require_distinct(option, files)
    if split is not None and not any(path.is_dir() for path in named):
        raise DataError(f"split: needs a folder in {option}, but {named[0]} is a file: leave split out")
    return tuple(files), others


def _require_distinct(option: str, files: list[Path]) -> None:
    """Raise DataError for a file that two paths or patterns name, also by a link."""
    seen: dict[Path, Path] = {}
    for file in files:
        first = seen.get(place := file.resolve())
        if first is not None:
            link = "" if first == file else f", also as {first}"
            raise DataError(
                f"{option}: {file} is named twice{link}: each of its rows would be two examples; name it once"
            )
        seen[place] = file


def _of_split(folder: Path, tables: list[Path], split: str | None) -> list[Path]:
    """Return the shards of a split. Their names are `SPLIT-00000-of-00002.parquet` or `SPLIT.parquet`."""
    names = {file: match["split"] if (match := _SHARD.fullmatch(file.stem)) else file.stem for file in tables}
    sharded = any(_SHARD.fullmatch(file.stem) for file in tables)
    splits = sorted(set(names.values()))
    if split is None and not sharded and len(SPLITS.intersection(splits)) < 2:
        return tables
    chosen = _chosen(folder, splits, split)
    return [file for file in tables if names[file] == chosen]


def _chosen(folder: Path, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None:
        raise DataError(f"split: {folder} has several splits: set split to one of {', '.join(splits)}")
    if split not in splits:
        raise DataError(f"split: {folder} has no split {split!r}; it has {', '.join(splits)}")
    return split
