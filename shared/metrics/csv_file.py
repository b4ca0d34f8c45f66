"""Rows as comma-separated values, with a header; what does not apply is empty."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import TextIO

from tessera.shared.metrics.rows import Row


def write(rows: Iterable[Row], file: TextIO) -> None:
    """`file` is to be opened with newline="". Floats are written so that they read back as the same bits."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
