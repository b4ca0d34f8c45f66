"""Differential privacy of a task: its spending, its access to data, and the metrics that it may report.

Privacy is reserved before it is used, so that a crash loses no entry, and taken back if the task ends before it has
read any data. Needs the extra `privacy`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog
from pydantic import JsonValue, NonNegativeInt
from torch import Tensor

from tessera.shared.api.tasks import Task
from tessera.shared.privacy.noise import KEY_BYTES, NoiseSource, secret_key
from tessera.shared.run_settings import Budget, InvalidDelta, Privacy, Unit, check_delta, rho_of
from tessera.shared.schedule import local_steps
from tessera.shared.schema import Frozen
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.governance.policy import Allowance, PolicyViolation, PrivacyFloor
from tessera.worker.privacy.accountant import Overspent, epsilon, noise_multiplier, within
from tessera.worker.privacy.budgets import SiteLimits
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients, sampling
from tessera.worker.privacy.known_examples import known_examples
from tessera.worker.privacy.pieces import GroupSampling
from tessera.worker.privacy.selection import Watched, bounded_sums, epsilon_per_pick, private_top_k
from tessera.worker.state.database import StateError
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import (
    OF_EXAMPLES,
    Cost,
    Ledger,
    LedgerEntry,
    LedgerPage,
    NoisyChoice,
    NoisySteps,
    noisy_in,
    of_training,
    unbounded_in,
)
from tessera.worker.training.batches import Batch
from tessera.worker.training.context import LocalTaskContext, largest
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import LocalTraining

E = TypeVar("E", NoisySteps, NoisyChoice)


class PrivateProgress(Frozen):
    """The progress of a private task in its checkpoint, to resume with the same noise: as secret as the data."""

    noise_key: str
    """In hexadecimal digits."""
    words_drawn: NonNegativeInt
    reserved: tuple[NonNegativeInt, ...]
    """The numbers of the ledger's entries for its events."""
    charged_choices: tuple[NoisyChoice, ...]
    charged_steps: NoisySteps
    chosen: tuple[tuple[int, ...], ...]
    """The results of `top_k`, in that order."""


class PrivateTask:
    """One task's training under differential privacy.

    Creation, before any data are read, raises PolicyViolation if the task would exceed the run's target or the site's
    `budget`, and LedgerError if the ledger is damaged.
    """

    def __init__(
        self,
        task: Task,
        privacy: Privacy,
        examples: int,
        ledger: Ledger,
        budget: Allowance | None,
        floor: PrivacyFloor | None = None,
        weekly: Allowance | None = None,
        total: Allowance | None = None,
        key: bytes | None = None,
        checkpoint: str = "",
        resumed: Mapping[str, JsonValue] | None = None,
        groups: Groups | None = None,
    ) -> None:
        """Check the task against the ledger. `key` seeds all randomness; if None, it is secret and new. `groups` are
        the data set's, if the run protects groups.

        `checkpoint` is the digest of the task's checkpoint key. With `resumed`, the `progress` in such a
        checkpoint, the noise continues, and nothing is charged again that the ledger has under this key.
        """
        if (groups is not None) != (privacy.unit == "group"):
            raise ValueError(f"groups are given if they are the unit; privacy.unit is {privacy.unit!r}")
        self.groups = groups
        """The groups that the run protects, if it does."""
        self.units = groups.count if groups else examples
        """The number of protected units: examples, or groups."""
        _require_guarantee(privacy.delta, self.units, privacy.unit)
        self._task = TaskRef.of(task)
        self._dataset = task.dataset
        self._rounds = task.rounds
        self._rounds_left = max(1, task.rounds - task.round + 1)
        """The number of rounds left, with this one."""
        self._privacy = privacy
        self._target = Budget(epsilon=privacy.epsilon, delta=privacy.delta)
        self._sampling = sampling(self.units, task.training.batch_size)
        self._ledger = ledger
        self._floor = floor
        self._limits = SiteLimits(
            task.dataset, privacy.unit, budget, weekly, total, partial(ledger.elsewhere, task.dataset)
        )
        self.checkpoint = checkpoint
        self._reserved: list[int] = []
        self._started = False
        """True once the task has read data, or a result may have left the site."""
        self._noise_source = NoiseSource(key or secret_key())
        self._events: list[NoisySteps | NoisyChoice] = []
        self._mechanism: Mechanism | None = None
        self._resumed: PrivateProgress | None = None
        self._start(resumed)
        self._selections = (privacy.selections or task.rounds) if privacy.selection == "noisy" else 0
        self._choice = NoisyChoice(rho=privacy.selection_share * rho_of(privacy) / max(1, self._selections))
        entries = self._others(ledger.read(task.dataset))
        choices = [self._choice] * min(1, self._selections)
        planned = self._noisy_steps(entries, local_steps(task.training, self.units))
        of_run = self._of_run(entries)
        self._ahead: list[NoisySteps | NoisyChoice] = [
            *self._choices_left(of_run),
            _noisy(planned.noise_multiplier, planned.sampling_rate, planned.steps * self._rounds_left),
        ]
        self._limits.judge(entries, [*choices, planned], self._ahead)
        if not of_run:
            self._limits.warn(self._task.run, entries, self._ahead)

    def resume(self, progress: Mapping[str, JsonValue]) -> None:
        """Begin the task again at the `progress` of its checkpoint. What it has reserved stays reserved."""
        self._start(progress)

    def _start(self, resumed: Mapping[str, JsonValue] | None) -> None:
        if resumed:
            self._resumed = PrivateProgress.model_validate(resumed)
            self._noise_source = NoiseSource(bytes.fromhex(self._resumed.noise_key), self._resumed.words_drawn)
        self._choices: list[tuple[int, ...]] = []
        self._chosen = False
        self._looked = False
        self._picks_left = 0
        self._epsilon_per_pick = 0.0

    # ------------------------------------------------------------ choosing blocks

    def watched(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches for a method that chooses blocks by them. Reading them spends privacy, or raises
        PolicyViolation."""
        return Watched(batches, self.look)

    def known(self, context: LocalTaskContext, dataset: Dataset) -> Tensor:
        """Return the mask of examples that may reach the model in a choice, bool [examples]. It needs the context's
        placeholder."""
        if context.placeholder is None:
            raise RuntimeError("the context of a private task has no placeholder")
        return known_examples(context, dataset, context.placeholder)

    def look(self) -> None:
        """Spend the privacy of reading the data for a choice, the first time. Raises PolicyViolation."""
        if self._privacy.selection == "refused":
            raise PolicyViolation(
                "privacy",
                "the method reads the data to choose blocks, which the run's epsilon does not cover: set "
                "privacy.selection to 'noisy', or to 'uncovered' to accept this explicitly",
            )
        if self._privacy.selection == "noisy" and not self._looked:
            if self._resumed:
                self._reserve_again(self._resumed)
            else:
                self._spend(lambda _: self._choice)
        self.start()
        if self._privacy.selection == "uncovered" and not self._looked:
            with self._ledger.page(self._dataset) as page:
                page.exact(self._task, self.units, "choice")
        self._looked = True

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> list[int]:
        """Return as `TaskContext.top_k`, by noisy sums if the run sets so. Each choice after the first spends
        privacy."""
        place, before = len(self._choices), self._resumed.chosen if self._resumed else ()
        # A resumed task chose already: other noise would be another choice.
        chosen = list(before[place]) if place < len(before) else self._top_k(scores, count, picks)
        self._chosen = True
        self._choices.append(tuple(chosen))
        return chosen

    def _top_k(self, scores: Array, count: int, picks: int | None) -> list[int]:
        if self._privacy.selection != "noisy":
            return largest(scores, count)
        if not self._looked:
            raise PolicyViolation("privacy", "the method chooses blocks without reading the data of this task")
        if not self._chosen or count > self._picks_left:
            if self._chosen:
                self._spend(lambda _: self._choice)
            self._picks_left = max(1, count, picks or 0)
            self._epsilon_per_pick = epsilon_per_pick(self._choice.rho, self._picks_left)
        self._picks_left -= count
        return private_top_k(bounded_sums(scores, self.groups), count, self._epsilon_per_pick, self._noise_source)

    def check_choice(self) -> None:
        """Raise PolicyViolation if blocks were chosen without noise. Call it after the choice."""
        if self._privacy.selection == "noisy" and self._looked and not self._chosen:
            raise PolicyViolation("privacy", "the method read the data and chose blocks without any noise")

    # ------------------------------------------------------------ training

    def begin(self, steps: int) -> None:
        """Reserve the privacy of a number of steps, and reseed all randomness. Raises PolicyViolation.

        A resumed task has reserved it, and its randomness is that of its checkpoint.
        """
        if self._resumed:
            self._reserve_again(self._resumed)
            if self._floor:
                self._floor.check_noise(self._resumed.charged_steps.noise_multiplier)
            self._mechanism = self._with_noise_of(self._resumed.charged_steps)
            return
        event = self._spend(lambda entries: self._noisy_steps(entries, steps))
        self._mechanism = self._with_noise_of(event)
        # Dropout is off. Other random draws of a model's code must be unpredictable too.
        seed_everything(self._noise_source.seed())

    def charge(self, steps: int) -> None:
        """Reserve the privacy of a number of steps unless `begin` has. Raises PolicyViolation."""
        if self._mechanism is None:
            self.begin(steps)

    def _with_noise_of(self, event: NoisySteps) -> Mechanism:
        return Mechanism(self._sampling, self._privacy.clip_norm, event.noise_multiplier)

    def progress(self) -> dict[str, JsonValue]:
        """Return what the task needs to resume, for its checkpoint, as `PrivateProgress` in JSON."""
        key, drawn = self._noise_source.state
        progress = PrivateProgress(
            noise_key=key.hex(),
            words_drawn=drawn,
            reserved=tuple(self._reserved),
            charged_choices=tuple(event for event in self._events if isinstance(event, NoisyChoice)),
            charged_steps=next(event for event in self._events if isinstance(event, NoisySteps)),
            chosen=tuple(self._choices),
        )
        return progress.model_dump(mode="json")

    def progress_without_noise(self) -> dict[str, JsonValue]:
        """Return the progress of a finished task, whose noise is in its update: what is left of it is a secret that
        nothing needs any more."""
        return {**self.progress(), "noise_key": bytes(KEY_BYTES).hex()}

    def resume_leaving(self) -> None:
        """Take over what a finished task has reserved, to leave under another lease. Raises PolicyViolation."""
        self.begin(0)
        self._looked = bool(self._resumed and self._resumed.chosen)

    def fit(self, local: LocalTraining, freeze: Freeze, dataset: Dataset, size: PieceSize) -> None:
        """Set `size` to the number of examples of a phase that fit into memory together, without any of the data.
        Raises ExampleTooLarge."""
        # Neither the clip norm nor the noise takes memory.
        mechanism = Mechanism(self._sampling, 1.0, 1.0)
        gradients = NoisyGradients(local, freeze, dataset, mechanism, NoiseSource(bytes(KEY_BYTES)), self.grouped)
        try:
            gradients.fit(size)
        finally:
            gradients.close()

    def start(self) -> None:
        """Note that the task reads data from now on: what it has reserved stays spent, for a coordinator that ends it
        observes how long it took until then."""
        self._started = True

    def phase(self, local: LocalTraining, freeze: Freeze, dataset: Dataset) -> NoisyGradients:
        if self._mechanism is None:
            raise RuntimeError("call begin before phase: it reserves the privacy")
        self.start()
        parts = freeze.parts if self._privacy.clip == "per-layer" else ()
        mechanism = replace(self._mechanism, parts=parts)
        return NoisyGradients(local, freeze, dataset, mechanism, self._noise_source, self.grouped)

    def handed_groups(self) -> Groups | None:
        """Return the groups, for the ranks of a group of processes."""
        return self.groups

    @property
    def grouped(self) -> GroupSampling | None:
        """The groups whose gradients are clipped, if they are the unit."""
        return GroupSampling(self.groups, self._privacy.examples_per_unit) if self.groups else None

    def spent(self) -> float:
        """Return the epsilon that the run has spent on this data set so far, at the run's delta."""
        return epsilon(self._of_run(self._ledger.read(self._dataset)), self._target.delta)

    def limit_weekly(self, weekly: Allowance | None) -> None:
        """Judge by this limit from now on, the only one that `leave` looks at."""
        self._limits = replace(self._limits, weekly=weekly)

    def leave(self) -> None:
        """Record that a result is about to leave the site: the reserved privacy stays spent, and counts from now on.

        Raises PolicyViolation if the week has no room left for it, and LedgerError.
        """
        reserved: list[int] = []
        with self._ledger.page(self._dataset) as page:
            if self._reserved:
                others = [entry for entry in page.entries if entry.seq not in self._reserved]
                self._limits.judge_leaving(others, self._events)
                reserved = [self._reserve(page, self._events, self._reserved).seq]
            if self._privacy.selection == "uncovered" and self._looked:
                page.exact(self._task, self.units, "choice")
        self._reserved = reserved
        self.start()

    def void(self) -> None:
        """Take back the reserved privacy, unless the task has read data."""
        if self._started or not self._reserved:
            return
        log = structlog.get_logger("worker").bind(dataset=self._dataset)
        try:
            with self._ledger.page(self._dataset) as page:
                page.void(self._task, self._reserved)
        except (StateError, OSError) as fault:
            # It stays spent, which is safe, and the task's own exception is not lost.
            log.exception("void-not-written", detail=str(fault))
        else:
            log.info("privacy-not-spent", entries=self._reserved)
        self._reserved = []

    # ------------------------------------------------------------ spending

    def _noisy_steps(self, entries: Sequence[LedgerEntry], steps: int) -> NoisySteps:
        """Return this task's steps, with noise that keeps the run within its target if the next rounds are alike.

        The noise is the same in every round, unless tasks were retried, which spends privacy again, or rounds differ.
        Raises PolicyViolation if the target is spent, or if the site requires more noise.
        """
        rate = self._sampling.rate
        spent = self._of_run(entries)
        ahead = [*spent, *self._choices_left(spent)]
        used = [event.noise_multiplier for event in spent if isinstance(event, NoisySteps)]
        try:
            planned = noise_multiplier(self._target, [self._choice] * self._selections, rate, self._rounds * steps)
            for noise in (planned, *used[-1:]):
                if within([*ahead, _noisy(noise, rate, steps * self._rounds_left)], self._target):
                    break
            else:
                noise = noise_multiplier(self._target, ahead, rate, steps * self._rounds_left)
        except Overspent as fault:
            raise PolicyViolation("privacy", f"the run has spent its target on {self._dataset!r}: {fault}") from fault
        if self._floor:
            self._floor.check_noise(noise)
        return _noisy(noise, rate, steps)

    def _choices_left(self, spent: Sequence[Cost]) -> list[NoisyChoice]:
        chosen = sum(isinstance(event, NoisyChoice) for event in spent)
        return [self._choice] * max(0, self._selections - chosen)

    def _spend(self, event_of: Callable[[Sequence[LedgerEntry]], E]) -> E:
        """Reserve the privacy of an event that may depend on the ledger, and return it. Raises PolicyViolation."""
        entries = self._ledger.read(self._dataset)
        # The slow computation is done, and cached, before this worker locks the page.
        self._limits.judge(entries, [event_of(entries)], self._ahead)
        with self._ledger.page(self._dataset) as page:
            event = event_of(page.entries)
            self._limits.judge(page.entries, [event], self._ahead)
            entry = self._reserve(page, [event])
        self._reserved.append(entry.seq)
        self._events.append(event)
        structlog.get_logger("worker").info("privacy-spent", dataset=self._dataset, events=[event.model_dump()])
        return event

    def _reserve(
        self, page: LedgerPage, events: Sequence[NoisySteps | NoisyChoice], replaces: Sequence[int] = ()
    ) -> LedgerEntry:
        unit = self._privacy.unit
        return page.spend(self._task, self.units, self._target, events, self.checkpoint, unit, replaces)

    def _reserve_again(self, resumed: PrivateProgress) -> None:
        """Take over what the ledger has under the checkpoint's key. Reserve it again if the process that reserved it
        took it back, because it had read no data. Raises PolicyViolation."""
        if self._reserved:
            return
        entries = self._ledger.read(self._dataset)
        own = {entry.seq for entry in entries if self._is_own(entry)}
        if not own < set(resumed.reserved):
            self._reserved = sorted(own)
            self.start()
            self._events = [*resumed.charged_choices, resumed.charged_steps]
            return
        events: list[NoisySteps | NoisyChoice] = [*resumed.charged_choices, resumed.charged_steps]
        if not within([*self._of_run(entries), *events], self._target):
            # Other tasks of the run may have counted on what was taken back.
            raise PolicyViolation("privacy", f"the run has spent its target on {self._dataset!r} meanwhile")
        for _ in resumed.charged_choices:
            self._spend(lambda _: self._choice)
        self._spend(lambda _: resumed.charged_steps)

    def _is_own(self, entry: LedgerEntry) -> bool:
        """Return whether a resumed task reserved this entry before, or replaced what it reserved by it to leave."""
        resumed = self._resumed
        if resumed is None or entry.checkpoint != self.checkpoint:
            return False
        return entry.seq in resumed.reserved or entry.voids == tuple(sorted(resumed.reserved))

    def _others(self, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        return [entry for entry in entries if not self._is_own(entry)]

    def _of_run(self, entries: Iterable[LedgerEntry]) -> list[Cost]:
        """Return what the run has spent. Raises PolicyViolation if it has protected single examples before."""
        own = [entry for entry in of_training(entries) if entry.run == self._task.run]
        if any(use == OF_EXAMPLES for _, use in unbounded_in(own, self._privacy.unit)):
            raise PolicyViolation("privacy", "the run has trained on single examples, and now protects groups")
        return noisy_in(own, self._privacy.unit)


def _noisy(noise: float, rate: float, steps: int) -> NoisySteps:
    return NoisySteps(noise_multiplier=noise, sampling_rate=rate, steps=steps)


def _require_guarantee(delta: float, units: int, unit: Unit) -> None:
    """Raise PolicyViolation for a delta that would permit the release of whole units."""
    try:
        check_delta(delta, units, unit, "privacy.delta")
    except InvalidDelta as fault:
        raise PolicyViolation("privacy", str(fault)) from None
    if delta > 0.1 / units:
        structlog.get_logger("worker").warning(
            "privacy-delta-large", delta=delta, examples=units, remedy=f"set the run's to {0.1 / units:.2g}"
        )
