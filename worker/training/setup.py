"""The settings of local training: the worker's for all tasks, one task's, and those of its differential privacy."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from pydantic import JsonValue
from torch import Tensor

from tessera.shared.methods.base import WorkerHalf
from tessera.shared.run_settings import Training
from tessera.worker.compute import Compute, MicroBatch
from tessera.worker.data.dataset import Dataset
from tessera.worker.training.checkpoints import TrainingCheckpoints
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.optimization.moments import Moments
from tessera.worker.training.optimization.precision import autocast
from tessera.worker.training.progress import Check, Report
from tessera.worker.training.ranks import OneRank, Ranks


@dataclass(frozen=True)
class TrainingSetup:
    """A worker's settings for the training of all tasks."""

    device: torch.device
    micro_batch: MicroBatch = None
    """Number of examples in a forward and backward pass, for a device on which a batch does not fit. The gradients of
    a batch's pieces add up to the batch's. A private task splits its samples itself, and uses `auto` only."""
    compute: Compute = field(default_factory=Compute)
    ranks: Ranks = field(default_factory=OneRank)
    """The processes that train together, of which this is one."""


class PrivateGradients(Protocol):
    """The gradients of a phase, with the noise of differential privacy."""

    def fill(self) -> None:
        """Set each parameter's gradient."""

    def close(self) -> None:
        """Restore the model as it was before."""


class PrivateTraining(Protocol):
    """The differential privacy of a task, for the training loop. `worker.privacy` implements it."""

    @property
    def units(self) -> int:
        """The number of protected units, of which batches are sampled: examples, or groups of them."""

    def begin(self, steps: int) -> None:
        """Reserve the privacy of a number of steps. Raises PolicyViolation."""

    def progress(self) -> dict[str, JsonValue]:
        """Return the charges and the state of the noise, for a checkpoint."""

    def fit(self, local: "LocalTraining", freeze: Freeze, dataset: Dataset, size: PieceSize) -> None:
        """Set `size` to the number of examples of a phase that fit into memory together. Raises ExampleTooLarge."""

    def phase(self, local: "LocalTraining", freeze: Freeze, dataset: Dataset) -> PrivateGradients:
        """Return the gradients for one phase."""


@dataclass(frozen=True)
class LocalTraining:
    """The parts of one task's training."""

    half: WorkerHalf[Any]
    context: LocalTaskContext
    training: Training
    setup: TrainingSetup
    check: Check
    private: PrivateTraining | None = None
    report: Report = field(default_factory=Report)
    """The progress report: its steps are counted at each, its loss about once a second."""
    min_loss_examples: int = 1
    """Number of examples, at least 1, from which on the mean loss is reported."""
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    """The loss scaler for float16. Pass the run's to begin at the scale of its last round."""
    round_number: int = 1
    """The round, from 1, of the `rounds` over which a schedule of the learning rate runs. By default it runs over
    this task alone, as for a personal model."""
    rounds: int = 1
    moments: Moments | None = None
    """The optimizer's moments of earlier rounds, which this training goes on with and updates."""
    checkpoints: TrainingCheckpoints | None = None
    piece_size: PieceSize | None = None
    """The size of pieces that the run's last task ended with; that of the setup if None."""
    clock: Callable[[], float] = time.monotonic
    """Seconds since some instant, by which losses are read from the device."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the method's loss of a batch, a scalar, computed in the run's precision."""
        with autocast(self.training, self.setup.device):
            return self.half.loss(self.context, batch)
