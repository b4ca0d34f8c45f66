"""What a task with differential privacy may do: what it spends, what it may look at, and what it may tell.

Everything is reserved before it is done, so that no crash forgets it, and taken back if nothing left. Needs the extra
`privacy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import structlog

from tessera.shared.api.tasks import Task
from tessera.shared.run_settings import Budget, Privacy, rho_of
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.registry import Dataset
from tessera.worker.governance.policy import Allowance, PolicyViolation, PrivacyFloor
from tessera.worker.privacy.accountant import Overspent, admits, epsilon, least_budget, noise_multiplier, within
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients, sampling
from tessera.worker.privacy.noise import NoiseSource, secret_key
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import (
    Event,
    Ledger,
    LedgerEntry,
    LedgerError,
    LedgerPage,
    NoisyChoice,
    NoisySteps,
    noisy_in,
)
from tessera.worker.training.context import largest
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.trainer import Batch, Trainer, seed_everything

DISCLOSED = ("steps", "effective_steps")
"""The numbers that a method may report. They follow from the settings and the number of examples."""

WEEK = timedelta(days=7)


class PrivateTask:
    """One task's training under differential privacy.

    Raises PolicyViolation when it is made, which is before any data is looked at, if the task would spend more than
    the run's target or the site's `budget` leaves; and LedgerError for a ledger that cannot be relied on.
    """

    def __init__(
        self,
        task: Task,
        privacy: Privacy,
        examples: int,
        ledger: Ledger,
        budget: Allowance | None,
        floor: PrivacyFloor | None = None,
        weekly: Budget | None = None,
        key: bytes | None = None,
    ) -> None:
        """`key` is what all randomness follows from; a secret one of this task alone if None."""
        _check_delta(privacy.delta, examples)
        self._task = TaskRef.of(task)
        self._dataset = task.dataset
        self._rounds = task.rounds
        self._rounds_left = max(1, task.rounds - task.round + 1)
        """With this one."""
        self._privacy = privacy
        self._target = Budget(epsilon=privacy.epsilon, delta=privacy.delta)
        self._sampling = sampling(examples, task.training.batch_size)
        self._ledger = ledger
        self._budget = budget
        self._floor = floor
        self._weekly = weekly
        self._reserved: list[int] = []
        self._leaves = False
        self._dice = NoiseSource(key or secret_key())
        self._mechanism: Mechanism | None = None
        self._selections = (privacy.selections or task.rounds) if privacy.selection == "noisy" else 0
        self._choice = NoisyChoice(rho=privacy.selection_share * rho_of(privacy) / max(1, self._selections))
        self._chosen = False
        self._looked = False
        self._picks_left = 0
        self._epsilon_per_pick = 0.0
        entries = ledger.check(task.dataset)
        choices = [self._choice] * min(1, self._selections)
        planned = self._noisy_steps(entries, task.training.epochs)
        of_run = self._of_run(entries)
        self._ahead = [
            *self._choices_left(of_run),
            _noisy(planned.noise_multiplier, planned.sampling_rate, planned.steps * self._rounds_left),
        ]
        self._judge(entries, [*choices, planned])
        if not of_run:
            self._warn_of_budget(entries)

    # ------------------------------------------------------------ choosing blocks

    def watched(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches for a method that chooses blocks by what it sees in them. Looking at them is what is
        paid for, or refused: raises PolicyViolation then."""
        return _Watched(batches, self._look)

    def _look(self) -> None:
        if self._privacy.selection == "refused":
            raise PolicyViolation(
                "privacy",
                "the method looks at the data to choose blocks, which the run's epsilon does not cover: set "
                "privacy.selection to 'noisy', or to 'uncovered' to say so in plain sight",
            )
        if self._privacy.selection == "noisy" and not self._looked:
            self._spend([self._choice])
        if self._privacy.selection == "uncovered" and not self._looked:
            with self._ledger.page(self._dataset) as page:
                page.exact(self._task, self._sampling.examples, "choice")
        self._looked = True

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> list[int]:
        """As `Work.top_k`, by noisy sums if the run says so: each choice after the first is paid for here."""
        if self._privacy.selection != "noisy":
            return largest(scores, count)
        if not self._looked:
            raise PolicyViolation("privacy", "the method chooses by what it has not seen in this task")
        if not self._chosen or count > self._picks_left:
            if self._chosen:
                self._spend([self._choice])
            self._picks_left = max(1, count, picks or 0)
            self._epsilon_per_pick = epsilon_per_pick(self._choice.rho, self._picks_left)
        self._chosen = True
        self._picks_left -= count
        return private_top_k(bounded_sums(scores), count, self._epsilon_per_pick, self._dice)

    def check_choice(self) -> None:
        """After blocks were chosen. Raises PolicyViolation if the choice went past the noise."""
        if self._privacy.selection == "noisy" and self._looked and not self._chosen:
            raise PolicyViolation("privacy", "the method looked at the data and chose blocks without any noise")

    # ------------------------------------------------------------ training

    def begin(self, epochs: int) -> None:
        """Pay for so many epochs, and makes all randomness the worker's own. Raises PolicyViolation."""
        entries = self._ledger.check(self._dataset)
        # What takes long is worked out, and remembered, before other workers have to wait for the page.
        self._judge(entries, [self._noisy_steps(entries, epochs)])
        with self._ledger.page(self._dataset) as page:
            event = self._noisy_steps(page.entries, epochs)
            self._write(page, [event])
        self._mechanism = Mechanism(self._sampling, self._privacy.clip_norm, event.noise_multiplier)
        # Dropout is off. What else a model's own code may draw must not be known either.
        seed_everything(self._dice.seed())

    def phase(self, trainer: Trainer, freeze: Freeze, dataset: Dataset) -> NoisyGradients:
        if self._mechanism is None:
            raise RuntimeError("nothing trains before it is paid for")
        return NoisyGradients(trainer, freeze, dataset, self._mechanism, self._dice)

    def disclosed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Of the numbers that would be reported those that no example has a part in."""
        return {name: value for name, value in metrics.items() if name in DISCLOSED}

    def spent(self) -> float:
        """Return the epsilon of all that the run was allowed here so far, at the run's delta."""
        return epsilon(self._of_run(self._ledger.read(self._dataset)), self._target.delta)

    def leave(self) -> None:
        """Say that something made of the data is about to leave: what was reserved stays spent."""
        self._leaves = True

    def void(self) -> None:
        """Take back what was reserved, unless something may have left."""
        if self._leaves or not self._reserved:
            return
        log = structlog.get_logger("worker").bind(dataset=self._dataset)
        try:
            with self._ledger.page(self._dataset) as page:
                page.void(self._task, self._reserved)
        except (LedgerError, OSError) as fault:
            # It stays spent, which is safe; and why the task ended must not be lost.
            log.exception("void-not-written", detail=str(fault))
        else:
            log.info("privacy-not-spent", entries=self._reserved)
        self._reserved = []

    # ------------------------------------------------------------ spending

    def _noisy_steps(self, entries: Sequence[LedgerEntry], epochs: int) -> NoisySteps:
        """This task's steps, with the noise that they need. Raises PolicyViolation if the site requires more."""
        event = self._needed_steps(entries, epochs)
        if self._floor:
            self._floor.check_noise(event.noise_multiplier)
        return event

    def _needed_steps(self, entries: Sequence[LedgerEntry], epochs: int) -> NoisySteps:
        """This task's steps, with noise that lets the run keep its target if the rounds to come are like this one.

        The same in every round, unless tasks were tried more than once, which costs anew, or rounds differ.
        """
        steps, rate = epochs * self._sampling.steps, self._sampling.rate
        spent = self._of_run(entries)
        ahead = [*spent, *self._choices_left(spent)]
        noises = [event.noise_multiplier for event in spent if isinstance(event, NoisySteps)]
        try:
            planned = noise_multiplier(self._target, [self._choice] * self._selections, rate, self._rounds * steps)
            for noise in (planned, *noises[-1:]):
                if within([*ahead, _noisy(noise, rate, steps * self._rounds_left)], self._target):
                    return _noisy(noise, rate, steps)
            return _noisy(noise_multiplier(self._target, ahead, rate, steps * self._rounds_left), rate, steps)
        except Overspent as fault:
            raise PolicyViolation("privacy", f"the run has spent its target on {self._dataset!r}: {fault}") from fault

    def _choices_left(self, spent: Sequence[Event]) -> list[Event]:
        chosen = sum(isinstance(event, NoisyChoice) for event in spent)
        return [self._choice] * max(0, self._selections - chosen)

    def _spend(self, events: Sequence[Event]) -> None:
        self._judge(self._ledger.check(self._dataset), events)
        with self._ledger.page(self._dataset) as page:
            self._write(page, events)

    def _write(self, page: LedgerPage, events: Sequence[Event]) -> None:
        self._judge(page.entries, events)
        entry = page.spend(self._task, self._sampling.examples, self._target, events)
        self._reserved.append(entry.seq)
        structlog.get_logger("worker").info(
            "privacy-spent", dataset=self._dataset, events=[event.model_dump() for event in events]
        )

    def _judge(self, entries: Sequence[LedgerEntry], events: Sequence[Event]) -> None:
        """Raise PolicyViolation if the events would take the data set beyond the site's budget, or what it allows in
        a week."""
        name = self._dataset
        if self._budget:
            self._budget.check_exact(name, entries)
        lately = _since(entries, datetime.now(UTC) - WEEK)
        for allowed, counted, rule, within_what in (
            (self._budget, entries, "privacy", ""),
            (self._weekly, lately, "max_weekly_privacy", " within seven days"),
        ):
            together = [*noisy_in(counted), *events]
            if allowed and not admits(together, allowed):
                needed = least_budget(together, allowed.delta)
                raise PolicyViolation(
                    rule,
                    f"this task would bring what is told of {name!r}{within_what} to an epsilon of "
                    f"{_up(needed)} at delta {allowed.delta:g}, and the site allows {allowed.epsilon:g}"
                    + (self._to_the_end(allowed, counted, needed) if rule == "privacy" else ""),
                )

    def _to_the_end(self, budget: Budget, entries: Sequence[LedgerEntry], least: float = 0.0) -> str:
        """Return what budget would hold the run to its end, if the rounds to come are as this one."""
        needed = max(least, least_budget([*noisy_in(entries), *self._ahead], budget.delta))
        return f"; all rounds of the run need a budget of {_up(needed)}"

    def _warn_of_budget(self, entries: Sequence[LedgerEntry]) -> None:
        """Say at the first task of a run if the budget does not hold all of its rounds. The site may not take part in
        each, so this is no reason to refuse."""
        if self._budget and not admits([*noisy_in(entries), *self._ahead], self._budget):
            structlog.get_logger("worker").warning(
                "budget-below-run",
                dataset=self._dataset,
                run=self._task.run,
                detail=f"the site allows {self._budget.epsilon:g}{self._to_the_end(self._budget, entries)}",
                remedy="raise the budget, or have the run spend less: its last rounds are refused otherwise",
            )

    def _of_run(self, entries: Iterable[LedgerEntry]) -> list[Event]:
        return noisy_in(entry for entry in entries if entry.run == self._task.run)


def _up(value: float) -> str:
    """As a budget that is set to it holds: never rounded down."""
    return f"{math.ceil(value * 100) / 100:g}" if math.isfinite(value) else "more than 1000"


def _since(entries: Iterable[LedgerEntry], at: datetime) -> list[LedgerEntry]:
    return [entry for entry in entries if entry.at > at]


@dataclass(frozen=True)
class _Watched:
    """Batches of which it is noticed that somebody looks at them."""

    batches: Iterable[Batch]
    look: Callable[[], None]

    def __iter__(self) -> Iterator[Batch]:
        self.look()
        return iter(self.batches)


def _noisy(noise: float, rate: float, steps: int) -> NoisySteps:
    return NoisySteps(noise_multiplier=noise, sampling_rate=rate, steps=steps)


def _check_delta(delta: float, examples: int) -> None:
    """Raise PolicyViolation for a delta that would allow to give whole examples away."""
    most = examples**-1.1
    if delta > most:
        raise PolicyViolation(
            "privacy",
            f"a delta of {delta:g} promises nothing to {examples} examples: set privacy.delta to {most:.2g} or less, "
            f"better to less than {0.1 / examples:.2g}",
        )
    if delta > 0.1 / examples:
        structlog.get_logger("worker").warning(
            "privacy-delta-large", delta=delta, examples=examples, remedy=f"have the run set {0.1 / examples:.2g}"
        )


def bounded_sums(scores: Array) -> Array:
    """Return the sums over the examples, float64 [candidates], of scores [examples, candidates] brought into [0, 1].

    So one example more or less moves each sum by at most 1, and none of them the other way. A score that is no number
    counts as 0. Scores are rounded to multiples of 2^-30, whose sums float64 holds exactly: in which order examples
    are added up changes nothing.
    """
    bounded = np.nan_to_num(scores.astype(np.float64)).clip(0, 1)
    sums: Array = np.ldexp(np.rint(np.ldexp(bounded, 30)).sum(axis=0), -30)
    return sums


def epsilon_per_pick(rho: float, count: int) -> float:
    """Of `count` picks that are `rho`-zCDP together."""
    return float(np.sqrt(8 * rho / count))


def private_top_k(sums: Array, count: int, epsilon_per_pick: float, dice: NoiseSource) -> list[int]:
    """Return the places of the `count` largest of noisy sums [candidates], largest first.

    One example more or less must move each sum by at most 1, and all of them the same way. One draw of Gumbel noise
    of scale 1/epsilon picks as the exponential mechanism does, one after the other (Durfee and Rogers 2019, arXiv
    1905.04273), and each pick is epsilon^2/8-zCDP (Cesar and Rogers 2021, arXiv 2004.07223).
    """
    noisy = sums + dice.gumbel(len(sums)) / epsilon_per_pick
    return [int(place) for place in np.argsort(-noisy)[:count]]
