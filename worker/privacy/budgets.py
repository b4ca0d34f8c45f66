"""A site's limits on the privacy that runs may spend of a data set, and the judgement of a task by them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate

import structlog

from tessera.shared.run_settings import Budget, Unit, UnitBudget
from tessera.worker.governance.policy import Allowance, PolicyViolation
from tessera.worker.privacy.accountant import admits, least_budget
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import (
    EXACT_EVERY,
    Cost,
    Ledger,
    LedgerEntry,
    Noisy,
    costs_of,
    noisy_in,
)

WEEK = timedelta(days=7)
NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class SiteLimits:
    """The limits for one data set, and for the tasks of a run that protects units of one kind."""

    dataset: str
    unit: Unit
    """The unit that the run protects. `costs_of` has the costs of its events for the unit of a budget."""
    budget: Allowance | None = None
    weekly: Allowance | None = None
    total: Allowance | None = None
    """The budget of all data sets together."""
    elsewhere: Callable[[], Sequence[LedgerEntry]] = tuple
    """A function to the entries of all other data sets."""

    def judge(self, entries: Sequence[LedgerEntry], events: Sequence[Noisy], ahead: Sequence[Noisy]) -> None:
        """Raise PolicyViolation if the events would exceed a limit. `ahead`: the events of the run's later rounds."""
        for allowed, counted, rule, where in self._limits(entries):
            together = self._costs(counted, events, allowed)
            if admits(together, allowed):
                continue
            needed = least_budget(together, allowed.delta)
            raise PolicyViolation(
                rule,
                f"this task would bring {where} to an epsilon of {_up(needed)} at delta {allowed.delta:g}, and the "
                f"site allows {allowed.epsilon:g}"
                + (self._to_the_end(allowed, counted, ahead, needed) if rule == "privacy" and ahead else ""),
            )

    def reserve(self, ledger: Ledger, task: TaskRef, units: int, target: Budget, event: Noisy) -> None:
        """Reserve the privacy of an event, while no other process can spend. Raises PolicyViolation, LedgerError."""
        with ledger.page(self.dataset) as page:
            self.judge(page.entries, [event], [])
            page.spend(task, units, target, [event])

    def judge_leaving(self, entries: Sequence[LedgerEntry], events: Sequence[Noisy]) -> None:
        """Raise PolicyViolation if events that were reserved earlier, and leave now, would exceed the weekly limit.

        Their reservation may be older than a week, and others may have left since. No other limit looks at the time.
        """
        replace(self, budget=None, total=None).judge(entries, events, [])

    def _limits(self, entries: Sequence[LedgerEntry]) -> Iterator[tuple[UnitBudget, Sequence[LedgerEntry], str, str]]:
        """Yield each limit with the entries that count for it, its rule, and the data that it covers, in words.
        Raises PolicyViolation for uses that a budget does not bound."""
        if self.budget:
            self.budget.check_exact(repr(self.dataset), entries)
            yield self.budget, entries, "privacy", repr(self.dataset)
        if self.weekly:
            what, now = f"{self.dataset!r} within seven days", datetime.now(UTC)
            dated = _dated(entries, now)
            # A use without noise is written down once a day, so the last use may be a day after its line.
            self.weekly.check_exact(what, [entry for at, entry in dated if at > now - WEEK - EXACT_EVERY])
            yield self.weekly, [entry for at, entry in dated if at > now - WEEK], "max_weekly_privacy", what
        if self.total:
            everything = [*entries, *self.elsewhere()]
            self.total.check_exact("all data sets together", everything)
            yield self.total, everything, "max_total_privacy", "all data sets together"

    def warn(self, run: str, entries: Sequence[LedgerEntry], ahead: Sequence[Noisy]) -> None:
        """Log a warning at a run's first task if the budget does not cover all rounds. The task is not refused, since
        the site may not take part in each."""
        budget = self.budget
        if budget and not admits(self._costs(entries, ahead, budget), budget):
            structlog.get_logger("worker").warning(
                "budget-below-run",
                dataset=self.dataset,
                run=run,
                detail=f"the site allows {budget.epsilon:g}{self._to_the_end(budget, entries, ahead)}",
                remedy="raise the budget, or let the run spend less: otherwise its last rounds are refused",
            )

    def _to_the_end(
        self, budget: UnitBudget, entries: Sequence[LedgerEntry], ahead: Sequence[Noisy], least: float = 0.0
    ) -> str:
        """Return a sentence about the budget for the whole run, if the next rounds are like this one."""
        needed = max(least, least_budget(self._costs(entries, ahead, budget), budget.delta))
        return f"; all rounds of the run need a budget of {_up(needed)}"

    def _costs(self, entries: Iterable[LedgerEntry], events: Iterable[Noisy], budget: UnitBudget) -> list[Cost]:
        """Return the costs of entries and further events for the unit that a budget protects."""
        further = [cost for event in events for cost in costs_of(event, self.unit, budget.unit)]
        return [*noisy_in(entries, budget.unit), *further]


def _dated(entries: Sequence[LedgerEntry], now: datetime) -> list[tuple[datetime, LedgerEntry]]:
    """Return the entries, each with its time or, after a slow clock, the later time of an entry before it.

    A time after `now` is from a fast clock, and no other entry gets it.
    """
    past = accumulate((entry.at if entry.at <= now else NEVER for entry in entries), max)
    return [(max(entry.at, before), entry) for before, entry in zip(past, entries, strict=True)]


def _up(value: float) -> str:
    """Return an epsilon as text, rounded up, so that a budget of this value suffices."""
    return f"{math.ceil(value * 100) / 100:g}" if math.isfinite(value) else "more than 1000"
