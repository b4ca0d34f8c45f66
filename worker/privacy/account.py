"""The accounting of one task's differential privacy: its reservations in the site's ledger, spent or taken back.

Privacy is reserved before it is used, so that a crash loses no entry, and taken back if the task ends before it has
read any data. The account knows neither examples nor noise. Needs the extra `privacy`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog
from pydantic import JsonValue, NonNegativeInt

from tessera.shared.api.tasks import Task
from tessera.shared.run_settings import Budget, InvalidDelta, Privacy, Unit, check_delta, rho_of
from tessera.shared.schedule import local_steps
from tessera.shared.schema import Value
from tessera.worker.governance.policy import Allowance, PolicyViolation, PrivacyFloor, require
from tessera.worker.privacy.accountant import Overspent, epsilon, noise_multiplier, within
from tessera.worker.privacy.budgets import SiteLimits
from tessera.worker.privacy.sampling import sampling
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

E = TypeVar("E", NoisySteps, NoisyChoice)


class Charges(Value):
    """A task's charges, for its checkpoint and for its update that waits for release."""

    reserved: tuple[NonNegativeInt, ...]
    """The numbers of the ledger's entries for its events."""
    charged_choices: tuple[NoisyChoice, ...]
    charged_steps: NoisySteps
    looked: bool
    """True if the task has read the data for a choice."""


class PrivacyAccount:
    """The account of one task's training under differential privacy.

    Creation, before any data are read, raises PolicyViolation if the task would exceed the run's target or the site's
    `budget`, and LedgerError if the ledger is damaged.
    """

    def __init__(
        self,
        task: Task,
        privacy: Privacy,
        units: int,
        ledger: Ledger,
        budget: Allowance | None,
        floor: PrivacyFloor | None = None,
        weekly: Allowance | None = None,
        total: Allowance | None = None,
        checkpoint: str = "",
        resumed: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Check the task, which protects `units` (examples, or groups), against the ledger.

        `checkpoint` is the digest of the task's checkpoint key. With `resumed`, the `charges` in such a checkpoint,
        nothing is charged again that the ledger has under this key.
        """
        self.units = units
        _require_guarantee(privacy.delta, units, privacy.unit)
        self._task = TaskRef.of(task)
        self._dataset = task.dataset
        self._rounds = task.trainings
        """The number of rounds in which the site trains, which the run's noise is computed for."""
        self._privacy = privacy
        self._target = Budget(epsilon=privacy.epsilon, delta=privacy.delta)
        self._rate = sampling(units, task.training.batch_size).rate
        self._ledger = ledger
        self._floor = floor
        self._limits = SiteLimits(
            task.dataset, privacy.unit, budget, weekly, total, partial(ledger.elsewhere, task.dataset)
        )
        self.checkpoint = checkpoint
        self._reserved: list[int] = []
        self._started = False
        """True once the task has read data, or a result may have left the site."""
        self._events: list[NoisySteps | NoisyChoice] = []
        self._resumed = Charges.model_validate(resumed) if resumed else None
        self._looked = self._charged = False
        self._selections = selections(privacy, self._rounds)
        self._choice = choice_of(privacy, self._rounds)
        entries = self._others(ledger.read(task.dataset))
        self._rounds_left = _rounds_left(task, entries)
        """The number of rounds left, with this one."""
        choices = [self._choice] * min(1, self._selections)
        planned = self._noisy_steps(entries, local_steps(task.local_training, units))
        of_run = self._of_run(entries)
        self._ahead: list[NoisySteps | NoisyChoice] = [
            *self._choices_left(of_run),
            _noisy(planned.noise_multiplier, planned.sampling_rate, planned.steps * self._rounds_left),
        ]
        self._limits.judge(entries, [*choices, planned], self._ahead)
        if not of_run:
            self._limits.warn(self._task.run, entries, self._ahead)

    def resume(self, charges: Mapping[str, JsonValue]) -> None:
        """Begin the task again at the `charges` of its checkpoint. Its reservations stay."""
        self._resumed = Charges.model_validate(charges)
        self._looked = False

    def forecast(self, steps: int) -> float:
        """Return the run's epsilon if each of its rounds has this many steps. Raises PolicyViolation."""
        event = self._noisy_steps([], steps)
        whole = _noisy(event.noise_multiplier, event.sampling_rate, steps * self._rounds)
        return epsilon([*self._choices_left([]), whole], self._target.delta)

    # ------------------------------------------------------------ before the data are read

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
                self.choose()
        self.start()
        if self._privacy.selection == "uncovered" and not self._looked:
            with self._ledger.page(self._dataset) as page:
                page.exact(self._task, self.units, "choice")
        self._looked = True

    def choose(self) -> None:
        """Spend the privacy of one choice. Raises PolicyViolation."""
        self._spend(lambda _: self._choice)

    def begin(self, steps: int) -> NoisySteps:
        """Reserve the privacy of a number of steps, and return it. Raises PolicyViolation.

        A resumed task has reserved it.
        """
        self._charged = True
        if not self._resumed:
            return self._spend(lambda entries: self._noisy_steps(entries, steps))
        self._reserve_again(self._resumed)
        if self._floor:
            self._floor.check_noise(self._resumed.charged_steps.noise_multiplier)
        return self._resumed.charged_steps

    def charge(self, steps: int) -> None:
        """Reserve the privacy of a number of steps unless `begin` has. Raises PolicyViolation."""
        if not self._charged:
            self.begin(steps)

    def start(self) -> None:
        """Note that the task reads data from now on: its reservations stay spent, because a coordinator that ends it
        observes how long it took until then."""
        self._started = True

    def charges(self) -> dict[str, JsonValue]:
        """Return the task's reservations, as `Charges` in JSON."""
        charges = Charges(
            reserved=tuple(self._reserved),
            charged_choices=tuple(event for event in self._events if isinstance(event, NoisyChoice)),
            charged_steps=next(event for event in self._events if isinstance(event, NoisySteps)),
            looked=self._looked,
        )
        return charges.model_dump(mode="json")

    # ------------------------------------------------------------ before a result leaves

    def resume_leaving(self) -> None:
        """Take over a finished task's reservations, to leave under another lease. Raises PolicyViolation."""
        self.begin(0)
        self._looked = bool(self._resumed and self._resumed.looked)

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
        rate = self._rate
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

    def _reserve_again(self, resumed: Charges) -> None:
        """Take over the ledger's entries under the checkpoint's key. Reserve their privacy again if the process that
        reserved it took it back, because it had read no data. Raises PolicyViolation."""
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
            # Other tasks of the run may have spent the privacy that was taken back.
            raise PolicyViolation("privacy", f"the run has spent its target on {self._dataset!r} meanwhile")
        for _ in resumed.charged_choices:
            self._spend(lambda _: self._choice)
        self._spend(lambda _: resumed.charged_steps)

    def _is_own(self, entry: LedgerEntry) -> bool:
        """Return True if a resumed task reserved this entry before, or replaced its reservations by it to leave."""
        resumed = self._resumed
        if resumed is None or entry.checkpoint != self.checkpoint:
            return False
        return entry.seq in resumed.reserved or entry.voids == tuple(sorted(resumed.reserved))

    def _others(self, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        return [entry for entry in entries if not self._is_own(entry)]

    def _of_run(self, entries: Iterable[LedgerEntry]) -> list[Cost]:
        """Return the costs of the run so far. Raises PolicyViolation if it has protected single examples before."""
        own = [entry for entry in of_training(entries) if entry.run == self._task.run]
        if any(use == OF_EXAMPLES for _, use in unbounded_in(own, self._privacy.unit)):
            raise PolicyViolation("privacy", "the run has trained on single examples, and now protects groups")
        return noisy_in(own, self._privacy.unit)


def _rounds_left(task: Task, entries: Iterable[LedgerEntry]) -> int:
    """Return the number of rounds in which the site may still train in the task's run, with the task's own. Raises
    PolicyViolation if the ledger has trainings in as many others as the run allows: another attempt at a round is of
    the same version, and costs again."""
    left = max(1, task.rounds - task.round + 1)
    if (most := task.cohort.max_updates_per_site) is None:
        return left
    charged = (entry for entry in entries if entry.run == task.run)
    rounds = {entry.round for entry in charged if any(isinstance(event, NoisySteps) for event in entry.events)}
    done = len(rounds - {task.round})
    detail = f"it has trained from the {most} versions that the run allows a site"
    require(done < most, "max_updates_per_site", detail)
    return min(left, task.trainings - done)


def selections(privacy: Privacy, rounds: int) -> int:
    """Return the number of noisy choices that a run pays for."""
    return (privacy.selections or rounds) if privacy.selection == "noisy" else 0


def choice_of(privacy: Privacy, rounds: int) -> NoisyChoice:
    """Return the cost of one of a run's choices."""
    return NoisyChoice(rho=privacy.selection_share * rho_of(privacy) / max(1, selections(privacy, rounds)))


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
