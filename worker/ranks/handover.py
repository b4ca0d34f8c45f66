"""Objects handed from process to process in a file, whose arrays the reader maps instead of copying.

A handover holds the bytes of its arrays, then a pickle of everything else, then the pickle's length. Only this
worker's own processes write and read it, in a folder that only its owner may enter.
"""

import io
import mmap
import pickle
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tessera.worker.state.atomic_files import written_whole

ALIGNMENT = 64
"""Arrays start at multiples of this number of bytes."""

LENGTH_BYTES = 8


def write(path: Path, given: object) -> None:
    """Write an object to a new handover, which appears when it is complete.

    Raises pickle.PicklingError, AttributeError or TypeError for an object that cannot leave its process.
    """
    with written_whole(path, durable=False, mode=0o600) as file:
        pickled = io.BytesIO()
        _Writer(pickled, file).dump(given)
        file.write(pickled.getbuffer())
        file.write(len(pickled.getbuffer()).to_bytes(LENGTH_BYTES, "little"))


def read(path: Path) -> Any:
    """Return a copy of the object. Its arrays are the file's pages until they are written to."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as whole:
        end = len(whole) - LENGTH_BYTES
        length = int.from_bytes(whole[end:], "little")
        pickled = whole[end - length : end]
    return _Reader(io.BytesIO(pickled), path).load()


class _Writer(pickle.Pickler):
    def __init__(self, pickled: BinaryIO, arrays: BinaryIO) -> None:
        super().__init__(pickled, protocol=5)
        self._arrays = arrays

    def persistent_id(self, each: Any) -> Any:
        """Write the bytes of a tensor or an array, and return its kind, first byte, dtype and shape."""
        if isinstance(each, Tensor):
            plain = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return ("tensor", self._place(plain), each.dtype, tuple(each.shape))
        if isinstance(each, np.ndarray) and not each.dtype.hasobject:
            plain = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
            return ("array", self._place(plain), each.dtype, each.shape)
        return None

    def _place(self, plain: np.ndarray) -> int:
        start = self._arrays.tell()
        start += self._arrays.write(bytes(-start % ALIGNMENT))
        self._arrays.write(plain.data)
        return start


class _Reader(pickle.Unpickler):
    def __init__(self, pickled: BinaryIO, path: Path) -> None:
        super().__init__(pickled)
        # Pages that are written to become this process's own. The array that refers to them keeps them mapped.
        self._whole = np.memmap(path, dtype=np.uint8, mode="c")

    def persistent_load(self, identity: Any) -> Any:
        kind, start, dtype, shape = identity
        size = prod(shape) * dtype.itemsize
        plain = np.asarray(self._whole[start : start + size])
        if kind == "array":
            return plain.view(dtype).reshape(shape)
        return torch.from_numpy(plain).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
