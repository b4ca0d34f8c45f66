"""One task in the process that executes it, and the context that its stages share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import WorkerHalf
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.spec import Model
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.governance.site_rules import SiteRules
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.state.privacy_ledger import Use
from tessera.worker.task.environment import facts_of
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.progress import Check, Report
from tessera.worker.training.setup import TrainingSetup


class Records(Protocol):
    """The records that a task's execution asks of the agent: `task.environment.SiteRecords`, here or there."""

    def note_exact(self, examples: int, use: Use) -> None: ...
    def reserve_figures(self, examples: int, epsilon: float, delta: float) -> float: ...
    def measure(self) -> None: ...
    def keep_scale(self, scale: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class LocalTask:
    """One task in the process that executes it."""

    task: Task
    """The task, with the site's own seed (`TaskRun.training_seed`)."""
    rules: SiteRules
    records: Records
    setup: TrainingSetup
    cache: RunCache
    scratch: Path
    """A folder for temporary files."""
    check: Check
    """Raises an exception to end the task early."""
    report: Report
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    """The loss scale that an earlier round kept."""
    sandbox: Sandbox | None = None
    """Sandbox in which an untrusted model is built first; None trusts every model, as in a simulation."""
    noise_key: bytes | None = None
    """Seed of a private task's noise, for simulations; None draws a secret one. Any other protects no data."""

    @property
    def device(self) -> torch.device:
        return self.setup.device

    @property
    def piece_size(self) -> PieceSize:
        """The size of pieces for the next task of the run, which training updates."""
        return self.cache.piece_sizes.setdefault(self.task.run, PieceSize.of(self.setup.micro_batch))

    def half(self, model: Model) -> WorkerHalf[Any]:
        """Return the worker's half of the task's method."""
        return worker_half(self.task.method, facts_of(self.task, model))
