"""Rows as comma-separated values, with a header; what does not apply is empty."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import TextIO

from tessera.shared.metrics.rows import MetricRow


def write(rows: Iterable[MetricRow], file: TextIO) -> None:
    """`file` is to be opened with newline="". Floats are written so that they read back as the same bits."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(MetricRow._fields)
    writer.writerows(rows)
