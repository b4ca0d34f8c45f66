"""Checkpoints of a task's training: their content, and the time at which they are written."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from torch import Tensor

from tessera.shared.tensors.lazy import as_bytes
from tessera.shared.updates.safetensors_file import write
from tessera.worker.state.atomic_files import written_whole
from tessera.worker.state.checkpoints import DOCUMENT, KEY, CheckpointKey, TaskCheckpoint, read_checkpoint

Document = dict[str, Any]
"""A JSON document."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class Position:
    """The position of training."""

    phase: int = 0
    batches: int = 0
    """Number of batches, or noisy steps, of this phase."""
    steps: int = 0
    """Number of steps of the phases before."""
    rate_steps: float = 0.0
    """The sum of the shares of the learning rate at these."""
    loss: float = math.nan
    """The loss so far, as `Trainer.train` returns it."""
    progress: int = 0
    """The number of steps that the task's progress shows."""
    training_seconds: float = 0.0


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each of which is read when it is asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = frozenset(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


class CheckpointFile:
    """The file of one task's newest checkpoint, if there is one. `document` is its JSON, None without a checkpoint.

    `note` has the agent note that the file was replaced.
    """

    def __init__(self, key: CheckpointKey, path: Path, note: Callable[[], None]) -> None:
        written, document = read_checkpoint(path)
        self.document: Document | None = document if written == key else None
        self._key = key
        self._path = path
        self._note = note

    @classmethod
    def of(cls, checkpoint: TaskCheckpoint) -> "CheckpointFile":
        """Return the file of a checkpoint of this process."""
        return cls(checkpoint.key, checkpoint.path, checkpoint.note_instance)

    @contextmanager
    def tensors(self) -> Iterator[StoredTensors]:
        """Yield the tensors. Do not keep one of them: it is a view of the file."""
        with safe_open(self._path, framework="pt") as file:
            yield StoredTensors(file)

    def write(self, document: Document, tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint; it is on disk when this returns. Raises OSError, and then the last one stays.

        Tensors are copied from their device one after the other.
        """
        layout = [(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
        metadata = {KEY: self._key.model_dump_json(), DOCUMENT: json.dumps(document)}
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_whole(self._path, mode=0o600) as file:
            write(file, layout, map(_bytes, tensors.values()), metadata)
        self._note()


class TrainingCheckpoints:
    """The checkpoints of one task's training, at least `seconds` after each other."""

    def __init__(self, stored: CheckpointFile, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.document = stored.document
        """The checkpoint from which training resumes."""
        self._stored = stored
        self._seconds = seconds
        self._clock = clock
        self._last = clock()
        self._log = structlog.get_logger("worker")

    def tensors(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Return the tensors of the newest checkpoint, to read within a `with` block."""
        return self._stored.tensors()

    @property
    def due(self) -> bool:
        return self._clock() - self._last >= self._seconds

    def hurry(self) -> None:
        """Have the next checkpoint written now."""
        self._last = -math.inf

    def write(self, position: Position, document: Document, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint. Training goes on if that fails: the last one stays."""
        began_at = self._clock()
        try:
            self._stored.write({"position": asdict(position), **document}, tensors)
        except OSError as fault:
            remedy = "Make room in state_dir. Training goes on, and tries again later."
            self._log.warning("checkpoint-not-written", detail=str(fault), remedy=remedy)
        else:
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            seconds = round(self._clock() - began_at, 2)
            self._log.info(
                "checkpoint", phase=position.phase, batches=position.batches, bytes=nbytes, seconds=seconds
            )
        self._last = self._clock()


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a prefix before each name."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


class PrefixView(Mapping[str, Tensor]):
    """The tensors whose names have a prefix, by the rest of their names. Each is read when it is asked for."""

    def __init__(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        self._prefix = f"{prefix}/"
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _bytes(tensor: Tensor) -> bytes | memoryview:
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return as_bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
