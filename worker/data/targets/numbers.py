"""Labels that are numbers: a 0 or 1 for each of several labels of an example, or the target of a regression."""

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import repeat

import torch
from torch import Tensor

from tessera.worker.data.readers.class_labels import LISTED, Numbering, class_name
from tessera.worker.data.readers.table_files import TableOptions
from tessera.worker.data.readers.tables import DataTable
from tessera.worker.errors import DataError

TRUTH = {"0": 0.0, "false": 0.0, "1": 1.0, "true": 1.0}
"""The values of a label's own column, as `class_name` returns them."""
MARKS = "|;"
"""The characters between the labels of a cell of text."""
MAX_TARGET = 1e30
"""The largest target: its square is a float32."""


def numbers_of(table: DataTable, options: TableOptions, label: str) -> Tensor:
    """Return the labels of a table as float32: 0 or 1 for each label, [rows, labels], or targets, [rows].

    Raises DataError, naming the row, for a label that is not in `labels`, and for a target that is no finite number.
    """
    if options.problem_type == "regression":
        return torch.tensor([_target(table, *cell) for cell in enumerate(table.cells("label", label))])
    names = options.labels or table.class_names(label)
    if not names or len(names) < 2:
        raise DataError(
            "labels: problem_type multi_label needs the names of two labels or more, the same at every site"
        )
    numbering = Numbering("label", table.where, names, options.absent)
    labels = torch.zeros(table.examples, len(names))
    if options.label_columns:
        for place, name in enumerate(names):
            for row, value in enumerate(table.cells("label_columns", name)):
                labels[row, place] = _truth(table, name, row, value)
    else:
        for row, value in enumerate(table.cells("label", label)):
            given = numbering.numbers(_labels_in(table, row, value, names), repeat(row))
            labels[row, [number for number in given if number >= 0]] = 1
    # A name without an example is refused, as for classes.
    numbering.numbers(names[place] for place in labels.any(dim=0).nonzero().flatten().tolist())
    numbering.check()
    return labels


def unlabelled(labels: Tensor) -> int:
    """Return the number of examples with none of several labels."""
    return int((labels == 0).all(dim=1).sum()) if labels.is_floating_point() and labels.ndim > 1 else 0


def _target(table: DataTable, row: int, value: object) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float | Decimal) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not abs(number) <= MAX_TARGET:
        raise DataError(
            f"label: row {row} of {table.where} has {str(value)[:40]!r}, which is no number up to {MAX_TARGET:g}, "
            "for problem_type regression: correct it, or remove the row"
        )
    return number


def _truth(table: DataTable, name: str, row: int, value: object) -> float:
    try:
        return TRUTH[class_name(value) or ""]
    except (KeyError, TypeError):
        raise DataError(
            f"label_columns: row {row} of {table.where} has {str(value)[:40]!r} in column {name!r}: write 1 for an "
            "example with the label, else 0, or remove the row"
        ) from None


def listed(value: object) -> object:
    """Return the list that a cell of text holds as JSON, or the value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, list) else value
    return value


def _labels_in(table: DataTable, row: int, value: object, names: Sequence[str]) -> list[object]:
    """Return the labels in a cell: a list, a list written as JSON, or names with `MARKS` between them. An empty cell
    has none."""
    if value is None or value == "":
        return []
    found = value if value in names else listed(value)
    if isinstance(found, list):
        if len(found) == len(names) and all(isinstance(each, int | float) and each in (0, 1) for each in found):
            raise DataError(
                f"label: row {row} of {table.where} has {str(found)[:40]}, which may be numbers of labels, or a 1 or "
                "0 for each label: write the labels' names, or make a column of each label and set label_columns"
            )
        return found
    if isinstance(value, str) and value not in names:
        text = value.strip()
        if LISTED.fullmatch(text) or text.startswith("["):
            raise DataError(
                f"label: row {row} of {table.where} has a list that is no JSON, {text[:40]!r}: write "
                '["edema", "effusion"] or edema|effusion'
            )
        if mark := next((mark for mark in MARKS if mark in text), None):
            return [part.strip() for part in text.split(mark) if part.strip()]
    return [value]
