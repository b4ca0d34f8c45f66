"""Opening hours and daily working time of a worker."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import NonNegativeFloat

from tessera.shared.run_settings import is_open, minutes_until_open
from tessera.shared.schema import Value
from tessera.worker.governance.policy import Policy
from tessera.worker.state.database import StateDatabase

USAGE = "usage"
"""Name of the note of a day's working time."""

NOTED_SECONDS = 5.0
"""Interval of writing usage to disk: the most work that a killed process forgets."""


def local_time() -> datetime:
    return datetime.now(UTC).astimezone()


class DayUsage(Value):
    """Working time on one day of the site's calendar."""

    day: str
    seconds: NonNegativeFloat = 0.0


class Opening:
    """Enforces hours by `now`, the site's local time, and the daily limit by `clock`, in seconds."""

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        now: Callable[[], datetime] = local_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._database = StateDatabase.of(folder)
        self._now = now
        self._clock = clock
        self._noted_at = clock()
        self._unwritten: DayUsage | None = None
        """The working time that could not be written."""

    def closed(self) -> str | None:
        """Return the reason why no task may be claimed now, or None."""
        hours = self._policy.hours
        if hours and not is_open(hours, self._now()):
            waits = minutes_until_open(hours, self._now())
            return f"outside of its hours ({', '.join(hours)}) for {waits // 60} h {waits % 60} min"
        if (most := self._policy.max_minutes_per_day) is not None and self.used_seconds() >= 60 * most:
            return f"the {most:g} minutes of this day are used up"
        return None

    def used_seconds(self) -> float:
        """Return today's working time in seconds."""
        used = self._read()
        return used.seconds if used.day == self._today() else 0.0

    def begin(self) -> None:
        """Start counting work."""
        self._noted_at = self._clock()

    def check(self) -> None:
        """Record work periodically. Raises PolicyViolation once the day's limit is used up."""
        if self._policy.max_minutes_per_day is not None and self._clock() - self._noted_at >= NOTED_SECONDS:
            self.end()
            self._policy.check_day(self.used_seconds())

    def end(self) -> None:
        """Record the work since the last entry. If that fails, it is counted in memory, and written later."""
        if self._policy.max_minutes_per_day is None:
            return
        at = self._clock()
        used = DayUsage(day=self._today(), seconds=self.used_seconds() + at - self._noted_at)
        self._noted_at = at
        try:
            self._database.set_note(USAGE, used.model_dump_json())
        except OSError as fault:
            self._unwritten = used
            remedy = "Make room in state_dir. Work goes on, and is written later; a restart would forget it."
            structlog.get_logger("worker").warning("usage-not-written", detail=str(fault), remedy=remedy)
        else:
            self._unwritten = None

    def _today(self) -> str:
        return self._now().date().isoformat()

    def _read(self) -> DayUsage:
        query = "SELECT value FROM notes WHERE name = ?"
        return self._unwritten or self._database.document(DayUsage, query, USAGE) or DayUsage(day="")
