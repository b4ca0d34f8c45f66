"""Objects as documents for another process: JSON with arrays beside it. No code travels.

A document holds the bytes of its arrays, then JSON of everything else, then the JSON's length. Read from a file, its
arrays are mapped in place of copied. A reader builds only numbers, texts, containers, tensors, and the records and
exceptions of two lists. An exception of a further class arrives as one of the listed class from which it derives, and
any other by its name alone: it might quote data, or mean something else there.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import ml_dtypes
import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import LocalResult, TrainingStats, UnsupportedRun
from tessera.shared.model.attention_stats import ByHead, LayerAttention
from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import DatasetSchema
from tessera.shared.model.selectors import Selector, SelectorError
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import Array
from tessera.worker.attention.probabilities import UnknownAttention
from tessera.worker.compute import Compute
from tessera.worker.data.dataset import DataChanged, DataError, Padding
from tessera.worker.data.groups import Groups
from tessera.worker.data.loaders import LoaderFailed
from tessera.worker.data.normalization import Normalized
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tessera.worker.model.block_map import UnknownArchitecture
from tessera.worker.model.build import ModelMismatch
from tessera.worker.model.config import ConfigError
from tessera.worker.model.layouts import MappingError, MappingFile
from tessera.worker.state.atomic_files import WriteFailed, disk_error, written_whole
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.state.checkpoints import CheckpointKey
from tessera.worker.state.hash_chain import ChainError
from tessera.worker.state.privacy_ledger import LedgerError, NoisySteps
from tessera.worker.task.errors import TaskFailure
from tessera.worker.task.fetch import Fetched
from tessera.worker.training.divergence import NoFiniteLoss, TrainingDiverged
from tessera.worker.training.input_mismatch import InputMismatch
from tessera.worker.training.optimization.micro_batch import ExampleTooLarge
from tessera.worker.training.progress import Report

T = TypeVar("T")

ALIGNMENT = 64
"""Arrays start at multiples of this number of bytes."""
LENGTH_BYTES = 8
UNEXPLAINED = "failed"
"""The code of failures that only the worker's own log explains."""


def _by_name(*kinds: type[Any]) -> dict[str, type[Any]]:
    return {kind.__name__: kind for kind in kinds}


EXCEPTIONS = _by_name(
    ChainError,
    ConfigError,
    DataChanged,
    DataError,
    ExampleTooLarge,
    InputMismatch,
    LedgerError,
    LoaderFailed,
    MappingError,
    ModelMismatch,
    NoFiniteLoss,
    PolicyViolation,
    SelectorError,
    TaskFailure,
    TrainingDiverged,
    UnknownArchitecture,
    UnknownAttention,
    UnsupportedRun,
    WriteFailed,
    torch.OutOfMemoryError,
)
"""The exceptions that arrive as they were raised."""

RECORDS = _by_name(
    Allowance,
    BlobTensor,
    Block,
    ByHead,
    CheckpointKey,
    Compute,
    DatasetSchema,
    Fetched,
    Groups,
    LayerAttention,
    LocalResult,
    Manifest,
    MappingFile,
    Model,
    NoisySteps,
    Normalized,
    Padding,
    Policy,
    Report,
    Selector,
    Task,
    TrainingStats,
)
"""The records that arrive as they were: pydantic models, which are validated again, and dataclasses."""


def _dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


TEXTS: dict[str, tuple[type[Any], Callable[[str], Any]]] = {
    "path": (Path, Path),
    "device": (torch.device, torch.device),
    "dtype": (torch.dtype, _dtype_of),
}
"""The kinds that travel as text, and what makes them of it."""


def record(kind: type[T]) -> type[T]:
    """Add a class to `RECORDS`."""
    RECORDS[kind.__name__] = kind
    return kind


def write(path: Path, value: object) -> None:
    """Write a document to a new file, which appears when it is complete. Raises TypeError for what none can hold."""
    with written_whole(path, durable=False, mode=0o600) as file:
        _write(file, value)


def read(path: Path) -> Any:
    """Return a copy of what a file holds. Its arrays are the file's pages until they are written to."""
    # Pages that are written to become this process's own. The array that refers to them keeps them mapped.
    return _read(np.memmap(path, dtype=np.uint8, mode="c"))


def dumps(value: object) -> bytes:
    """Return a document. Raises TypeError for what none can hold."""
    file = io.BytesIO()
    _write(file, value)
    return file.getvalue()


def loads(raw: bytes) -> Any:
    """Return a copy of what a document holds."""
    return _read(np.frombuffer(bytearray(raw), np.uint8))


def _write(file: BinaryIO, value: object) -> None:
    text = json.dumps(_Writer(file).form_of(value), separators=(",", ":")).encode()
    file.write(text)
    file.write(len(text).to_bytes(LENGTH_BYTES, "little"))


def _read(whole: Array) -> Any:
    end = len(whole) - LENGTH_BYTES
    length = int.from_bytes(whole[end:].tobytes(), "little")
    return _Reader(whole).value_of(json.loads(whole[end - length : end].tobytes()))


class _Writer:
    """The JSON forms of values: a scalar as it is, everything else as a list of a kind and its parts."""

    def __init__(self, arrays: BinaryIO) -> None:
        self._arrays = arrays

    def form_of(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return value.item()
            case list():
                return ["list", *map(self.form_of, value)]
            case tuple():
                return ["tuple", *map(self.form_of, value)]
            case Mapping():
                return ["dict", *([self.form_of(key), self.form_of(each)] for key, each in value.items())]
            case Tensor():
                plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                return ["tensor", self.form_of(plain), str(value.dtype), list(value.shape)]
            case np.ndarray() if not value.dtype.hasobject:
                plain = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                name = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
                return ["array", self._place(plain), name, list(value.shape)]
            case BaseException():
                return ["exception", *map(self.form_of, _parts_of(value))]
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return ["bytes", self.form_of(np.frombuffer(value, np.uint8))]
        if isinstance(value, frozenset):
            return ["frozenset", *map(self.form_of, sorted(value))]
        for name, (text, _) in TEXTS.items():
            if isinstance(value, text):
                return [name, str(value)]
        name = type(value).__name__
        if RECORDS.get(name) is not type(value):
            raise TypeError(f"a {name} cannot be handed to another process")
        if isinstance(value, BaseModel):
            # The defaults of a policy are settings that were left out, some of which nobody can write.
            return [name, value.model_dump_json(exclude_defaults=isinstance(value, Policy))]
        return [name, *([each.name, self.form_of(getattr(value, each.name))] for each in fields(value) if each.init)]

    def _place(self, plain: Array) -> int:
        start = self._arrays.tell()
        start += self._arrays.write(bytes(-start % ALIGNMENT))
        self._arrays.write(plain.data)
        return start


class _Reader:
    """The values of the forms of `_Writer`, whose arrays are in `whole`."""

    def __init__(self, whole: Array) -> None:
        self._whole = whole

    def value_of(self, form: Any) -> Any:
        match form:
            case ["list", *parts]:
                return [self.value_of(part) for part in parts]
            case ["tuple", *parts]:
                return tuple(self.value_of(part) for part in parts)
            case ["frozenset", *parts]:
                return frozenset(map(self.value_of, parts))
            case ["dict", *parts]:
                return {self.value_of(key): self.value_of(part) for key, part in parts}
            case ["bytes", plain]:
                return self.value_of(plain).tobytes()
            case ["tensor", plain, name, shape]:
                array, dtype = self.value_of(plain), _dtype_of(name)
                # No empty array can be viewed.
                flat = torch.from_numpy(array).view(dtype) if len(array) else torch.empty(0, dtype=dtype)
                return flat.reshape(shape)
            case ["array", start, name, shape]:
                kind = np.dtype(getattr(ml_dtypes, name, name))
                plain = np.asarray(self._whole[start : start + prod(shape) * kind.itemsize])
                return plain.view(kind).reshape(shape)
            case ["exception", name, arguments, attributes]:
                return _exception_of(name, self.value_of(arguments), self.value_of(attributes))
            case [name, *parts]:
                return self._other(name, parts)
        return form

    def _other(self, name: str, parts: list[Any]) -> Any:
        if name in TEXTS:
            return TEXTS[name][1](parts[0])
        kind = RECORDS[name]
        if not is_dataclass(kind):
            return kind.model_validate_json(parts[0])
        return kind(**{name: self.value_of(part) for name, part in parts})


def _parts_of(exception: BaseException) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return the name of the first of `EXCEPTIONS` from which an exception derives, its arguments and its attributes:
    those of a failure that names the exception alone, if there is none."""
    if isinstance(exception, OSError) and disk_error(exception):
        # Of the machine: the worker gives the task back for it. Its arguments lack the file.
        return WriteFailed.__name__, (exception.errno, exception.strerror, exception.filename), vars(exception)
    for kind in type(exception).__mro__:
        if EXCEPTIONS.get(kind.__name__) is kind:
            return kind.__name__, exception.args, vars(exception)
    return _parts_of(TaskFailure(UNEXPLAINED, f"{type(exception).__name__} in a rank; the worker's own log has more"))


def _exception_of(name: str, arguments: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Return an exception without its traceback, also if its constructor takes other arguments."""
    kind = EXCEPTIONS[name]
    exception: BaseException = kind.__new__(kind, *arguments)
    vars(exception).update(attributes)
    return exception
