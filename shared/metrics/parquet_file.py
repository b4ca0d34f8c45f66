"""Rows as a Parquet file, one typed column a field."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tessera.shared.metrics.rows import MetricRow

TYPES = {
    "run": pa.string(),
    "version": pa.int64(),
    "round": pa.int64(),
    "attempt": pa.int64(),
    "stage": pa.string(),
    "dataset": pa.string(),
    "site": pa.string(),
    "worker": pa.string(),
    "metric": pa.string(),
    "value": pa.float64(),
}


def write(rows: Sequence[MetricRow], path: Path) -> None:
    columns = {name: pa.array([getattr(row, name) for row in rows], kind) for name, kind in TYPES.items()}
    pq.write_table(pa.table(columns), path)
