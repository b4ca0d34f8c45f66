"""The files of a table: listed, matched by a pattern, or the shards in a folder; and folders saved by `datasets`."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from glob import glob
from pathlib import Path
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tessera.shared.model.dataset_schema import Problem
from tessera.shared.near_names import absent
from tessera.shared.schema import Label
from tessera.worker.data.dataset import Options
from tessera.worker.data.groups import SUBGROUPS, SubgroupValues
from tessera.worker.data.readers.class_labels import Absent, Names
from tessera.worker.data.readers.data_folders import foreign
from tessera.worker.errors import DataError

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
        default=None, description="the names in `labels` without an example at this site, or `any`"
    )
    problem_type: Literal["single_label", "multi_label", "regression"] = Field(
        default="single_label",
        description="whether an example has one class, several of the `labels` or none, or a number, as its model's",
    )
    label_columns: bool = Field(
        default=False,
        description="for multi_label: whether each of the `labels` names a column with 1 or 0, instead of `label`",
    )
    domain: str | None = Field(default=None, description="column: the example's origin")
    group: str | None = Field(default=None, description="column: equal values are held out together (the patient)")
    subgroups: dict[Label, SubgroupValues] = Field(default={}, description=SUBGROUPS)

    @model_validator(mode="after")
    def _labels_fit(self) -> Self:
        if self.label_columns and (self.problem_type != "multi_label" or not self.labels):
            raise ValueError(
                'label_columns: needs problem_type = "multi_label", and the names of the columns in labels'
            )
        if self.problem_type == "regression" and (self.labels or self.absent):
            raise ValueError("labels and absent are about classes: with problem_type regression, leave them out")
        return self

    @property
    def problem(self) -> Problem | None:
        """The task of labels that are no classes."""
        return None if self.problem_type == "single_label" else self.problem_type


def is_saved(folder: Path) -> bool:
    """Return True if `save_to_disk` of `datasets` made the folder."""
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


class TableFiles(NamedTuple):
    files: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    """The files in folders of shards that are no tables."""
    passed_over: Mapping[str, int] = {}
    """The number of files and folders there that systems and programs left, by name."""


def table_files(option: str, named: tuple[Path, ...], split: str | None, suffixes: Collection[str]) -> TableFiles:
    """Return the files that paths, patterns and folders of shards stand for. Raises DataError."""
    files: list[Path] = []
    others: list[Path] = []
    passed_over = Counter[str]()
    for path in named:
        if path.is_dir():
            everything = sorted(path.iterdir())
            # Spark writes files about its shards whose names begin with an underscore.
            labels = {each: foreign(each.name) or (each.name if each.name[0] == "_" else None) for each in everything}
            passed_over.update(filter(None, labels.values()))
            there = [each for each in everything if not labels[each] and (each.is_file() or each.is_symlink())]
            tables = [file for file in there if file.suffix.lower() in suffixes]
            if not tables:
                inside = ", ".join(file.name for file in everything[:MAX_SHOWN]) or "nothing"
                kinds = ", ".join(suffixes)
                raise DataError(
                    f"{option}: the folder {path} contains no table ({kinds}); it contains {inside}: name another"
                )
            others += (file for file in there if file not in tables)
            files += _of_split(path, tables, split)
        elif path.is_file():
            files.append(path)
        elif matched := [*map(Path, sorted(glob(str(path), recursive=True)))]:  # noqa: PTH207 (a pattern may be absolute)
            labels = {file: _left_behind(file, path) for file in matched}
            passed_over.update(filter(None, labels.values()))
            files += (file for file in matched if not labels[file])
        else:
            raise DataError(f"{option}: {absent(path)}")
    if not files:
        raise DataError(f"{option}: {named[0]} matches only files of systems and programs; name others")
    _require_distinct(option, files)
    if split is not None and not any(path.is_dir() for path in named):
        raise DataError(f"split: needs a folder in {option}, but {named[0]} is a file: leave split out")
    return TableFiles(tuple(files), tuple(others), passed_over)


def _left_behind(file: Path, pattern: Path) -> str | None:
    """Return the foreign name in a path that a pattern matches and does not name itself, or None."""
    return next((label for part in file.parts if part not in pattern.parts and (label := foreign(part))), None)


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
        raise DataError(f"split: {folder} has several splits: set split (--split) to one of {', '.join(splits)}")
    if split not in splits:
        raise DataError(f"split: {folder} has no split {split!r}; it has {', '.join(splits)}")
    return split
