"""The stage that shortens the training of a task to a rehearsal, and measures it. Nothing of it is kept."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

from tessera.shared.api.rehearsals import STEPS
from tessera.shared.methods.base import Phase
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.state.privacy_ledger import NoisySteps
from tessera.worker.task.handover import TaskOutcome
from tessera.worker.training.context import LocalTaskContext, synthetic_examples
from tessera.worker.training.progress import Report
from tessera.worker.training.trainer import epochs_of, steps_of

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import Account


class Rehearsal:
    """The rehearsal of one task, which trains `STEPS` steps of each phase.

    The rows are the first ones of the order in which the task would train, or synthetic ones where the task's course
    may reveal nothing of an example. No other rows are read, and no privacy is spent.
    """

    def __init__(self, local: LocalTask, dataset: Dataset, account: Account | None) -> None:
        task, device = local.task, local.device
        self._training, self._synthetic = task.training, local.rules.rehearses_synthetic(task)
        self._examples, self._units = dataset.examples, account.units if account else dataset.examples
        self._most = task.privacy.examples_per_unit if task.privacy and task.privacy.unit == "group" else None
        self._rows = min(STEPS * (task.training.batch_size or self._units), self._units)
        self._phase_steps: list[int] = []
        self._steps, self._marks = StepTimes(device=device), [time.monotonic()]
        # A cache of its own: the next task may need the whole data set as tokens, and finds room for its own model.
        local.cache.models.take("", "", frozenset())
        local.report.begin("training")
        self.local = replace(local, cache=RunCache(), report=self._steps, loss_scale={})
        self.account = UnchargedAccount(self._rows) if account else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._held_bytes = torch.cuda.memory_allocated(device)

    def sample(self, dataset: Dataset) -> Dataset:
        """Return the rows of the data set that it trains on, or the shape of synthetic ones."""
        if self._synthetic:
            return dataset.blank()
        order = torch.randperm(dataset.examples, generator=torch.Generator().manual_seed(self.local.task.seed))
        return dataset.rows(order[: self._rows])

    def mark(self) -> None:
        """Note that the version is loaded, before texts are tokenized."""
        self._marks.append(time.monotonic())

    def fill(self, context: LocalTaskContext, sample: Dataset) -> Dataset:
        """Return the tokenized rows, or synthetic ones of their shape."""
        self.mark()
        if not self._synthetic:
            return sample
        of_each = min(self._most, -(-self._examples // self._units)) if self._most else 1
        rows = synthetic_examples(context.model, sample, self._rows * of_each)
        groups = [str(n // of_each).encode() for n in range(self._rows * of_each)] if self._most else None
        return replace(sample, tensors=rows, groups=groups)

    def shorten(self, phases: Sequence[Phase]) -> tuple[list[Phase], Training]:
        """Return the phases of a round with two steps each. Raises PolicyViolation if the round is too long."""
        self.local.rules.policy.check_epochs(epochs_of(phases, self._training, self._units))
        planned = [(phase, steps_of(phase, self._training, self._units)) for phase in phases]
        self._phase_steps = [steps for _, steps in planned if steps]
        short = [replace(phase, epochs=None) for phase, steps in planned if steps]
        return short, self._training.model_copy(update={"steps": STEPS})

    def outcome(self, trained: TaskOutcome) -> TaskOutcome:
        """Return the outcome of training with the figures of the rehearsal as its metrics."""
        began, loaded, tokenized, ended = *self._marks, time.monotonic()
        at, device = self._steps.ended, self.local.device
        # The second step: the first one also sets libraries up.
        lasted = [at[number] - at[number - 1] for number in range(STEPS, len(at) + 1, STEPS)]
        figures = {
            "steps": float(sum(self._phase_steps)),
            "train_seconds": sum(each * steps for each, steps in zip(lasted, self._phase_steps, strict=False)),
            "load_seconds": ended - tokenized + loaded - began - sum(lasted) * STEPS,
            "tokenize_seconds": (tokenized - loaded) * (1 if self._synthetic else self._examples / self._rows),
        }
        if device.type == "cuda":
            figures["device_bytes"] = float(torch.cuda.max_memory_allocated(device) - self._held_bytes)
        if not self._synthetic:
            # That of the process includes the data sets, and what earlier tasks took.
            figures["host_bytes"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert trained.result  # noqa: S101  (of a task that trains)
        return TaskOutcome(self._units, replace(trained.result, metrics=figures))


@dataclass
class StepTimes(Report):
    """A report that notes when each step ended on the device."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ended: dict[int, float] = field(default_factory=dict)
    """By the number of the step, from 1."""

    def advance(self) -> None:
        super().advance()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ended[self.step] = time.monotonic()


@dataclass(frozen=True)
class UnchargedAccount:
    """The account of a rehearsal: its rows are synthetic, so that its steps cost nothing."""

    units: int

    def look(self) -> None: ...
    def choose(self) -> None: ...
    def start(self) -> None: ...
    def begin(self, steps: int) -> NoisySteps:
        return NoisySteps(noise_multiplier=1.0, sampling_rate=1.0, steps=steps)

    def charges(self) -> dict[str, JsonValue]:
        return {}

    def spent(self) -> float:
        return 0.0
