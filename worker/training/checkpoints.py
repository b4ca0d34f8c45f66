"""Checkpoints of a task's training: what they hold, and when they are written."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import structlog
from torch import Tensor

Document = dict[str, Any]
"""A JSON document."""


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


class StoredCheckpoint(Protocol):
    """The place of one task's newest checkpoint. `worker.state.checkpoints` implements it."""

    @property
    def document(self) -> Document | None:
        """The document that an earlier process wrote; None without a checkpoint."""

    def tensors(self) -> AbstractContextManager[Mapping[str, Tensor]]: ...
    def write(self, document: Document, tensors: Mapping[str, Tensor]) -> None: ...


class TrainingCheckpoints:
    """The checkpoints of one task's training, at least `seconds` after each other."""

    def __init__(self, stored: StoredCheckpoint, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
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


class Below(Mapping[str, Tensor]):
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
