"""The parts of a data set that is divided among sites."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tessera.worker.data.dataset import DataError, Dataset
from tessera.worker.data.partition.distortion import distort
from tessera.worker.data.partition.schemes import Scheme, Shift


def divide(whole: Dataset, partition: Scheme) -> list[Dataset]:
    """Return every site's part. Raises DataError for a data set that cannot be divided so."""
    return [make() for make in makers(whole, partition)]


def makers(whole: Dataset, partition: Scheme) -> list[Callable[[], Dataset]]:
    """Return what makes each site's part when it is wanted. Raises DataError, here or then, as `divide` does."""
    return [partial(_made, whole, partition, rows, index) for index, rows in enumerate(_rows(whole, partition))]


def part_of(whole: Dataset, partition: Scheme, index: int) -> Dataset:
    """Return the part of the site `index`. Raises DataError for a data set that cannot be divided so."""
    return _made(whole, partition, _rows(whole, partition)[index], index)


def _rows(whole: Dataset, partition: Scheme) -> list[np.ndarray]:
    try:
        return partition.rows(whole)
    except ValueError as fault:
        raise DataError(f"part: {fault}") from fault


def _made(whole: Dataset, partition: Scheme, rows: np.ndarray, index: int) -> Dataset:
    part = whole.rows(torch.from_numpy(rows))
    if not isinstance(partition, Shift):
        return part
    try:
        return distort(part, whole, partition.distortion(index), partition.noise_seed(index))
    except DataError as fault:
        raise DataError(f"part: {fault}") from fault
