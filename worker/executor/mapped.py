"""Data sets as pickles whose tensors and arrays lie beside them in the file, for processes that map and share them.

Readers of rows on disk are functions with a state, which torch's DataLoader pickles for its processes too. The file
is in a folder that only the worker's user may enter.
"""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.load_report import LoadReport
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.state.atomic_files import written_whole

ALIGNMENT = 64
"""Arrays start at multiples of this number of bytes."""
LENGTH_BYTES = 8


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (flat, value.dtype, tuple(value.shape))
        if isinstance(value, LoaderProcesses):
            return _loaders, (value.count, value.pinned)
        return NotImplemented


def _tensor(plain: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # No empty array can be viewed.
    flat = torch.from_numpy(plain).view(dtype) if len(plain) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _loaders(count: int, pinned: bool) -> LoaderProcesses:
    return LoaderProcesses(count, pinned=pinned)


def plain(dataset: Dataset) -> Dataset:
    """Return a data set without columns that training and evaluation do not read, which may be open files."""
    held_out = dataset.held_out and plain(dataset.held_out)
    groups = None if dataset.groups is None else list(dataset.groups)
    return replace(dataset, held_out=held_out, domains=None, sources=None, groups=groups, report=LoadReport())


def write(path: Path, value: object) -> None:
    """Write a value. Raises TypeError, AttributeError or PicklingError for rows that no other process can read."""
    buffers: list[pickle.PickleBuffer] = []
    with written_whole(path, durable=False, mode=0o600) as file:
        pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
        pickler.dump(value)
        spans = []
        for buffer in buffers:
            file.write(bytes(-file.tell() % ALIGNMENT))
            raw = buffer.raw()
            spans.append((file.tell(), raw.nbytes))
            file.write(raw)
        table = pickle.dumps(spans)
        file.write(table + len(table).to_bytes(LENGTH_BYTES, "little"))


def read(path: Path) -> Any:
    """Return a copy of a value. Its arrays are the file's pages until they are written to."""
    # The arrays that refer to the pages keep them mapped.
    whole = np.memmap(path, dtype=np.uint8, mode="c").data
    end = len(whole) - LENGTH_BYTES
    length = int.from_bytes(whole[end:], "little")
    spans = pickle.loads(whole[end - length : end])  # noqa: S301  (this worker's own)
    return pickle.loads(whole, buffers=[whole[start : start + nbytes] for start, nbytes in spans])  # noqa: S301
