"""The expected end of an open round, from earlier rounds and its workers' progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from tessera.shared.api.tasks import TaskView
from tessera.shared.schema import TaskState

LIVE_TASKS: tuple[TaskState, ...] = ("offered", "leased", "expired")
"""States of a task whose report may still arrive."""

MIN_SHARE = 0.02
"""Share of its task that a worker must have done before its pace is used."""

FETCHED, TRAINED = 0.1, 0.9
"""Shares of a task done after fetching and after training; assumed, because transfer times are unknown."""


@dataclass(frozen=True)
class TaskPace:
    """A worker's progress with its task."""

    over: bool
    began_at: float | None = None
    """The instant of its lease, which may be later than the round's start."""
    phase: str | None = None
    done: float | None = None
    """The share of the phase; None if it is unknown."""

    @classmethod
    def of(cls, task: TaskView, began_at: float | None = None) -> Self:
        """Return the progress that a task's worker has reported."""
        if task.state not in LIVE_TASKS:
            return cls(over=True)
        progress = task.progress
        if task.state != "leased" or progress is None:
            return cls(over=False)
        done = (progress.step or 0) / progress.steps if progress.steps else None
        if done is None and progress.total_bytes:
            done = (progress.bytes or 0) / progress.total_bytes
        return cls(over=False, began_at=began_at, phase=progress.phase, done=done)

    @property
    def share(self) -> float:
        """The share of the whole task, in [0, 1]."""
        if self.over:
            return 1.0
        done = min(1.0, max(0.0, self.done or 0.0))
        if self.phase == "fetching":
            return FETCHED * done
        if self.phase in ("training", "evaluating"):
            if self.done is None:
                # A private task reports no steps, and its pace is unknown.
                return 0.0
            return FETCHED + (TRAINED - FETCHED) * done
        return TRAINED + (1 - TRAINED) * done if self.phase == "uploading" else 0.0


def expected_end(
    opened_at: float, now: float, deadline_at: float, before: Sequence[float], paces: Sequence[TaskPace]
) -> float | None:
    """Return the expected end. `before` has the durations of earlier rounds in seconds; without any, return None.

    The pace of a first round alone says little: it counts steps, and not the work before and after them. A round is
    as slow as its slowest worker. Earlier rounds count at its start, and its workers' own pace the more, the more
    they have done. When a person releases an update is unknown.
    """
    if not before or any(pace.phase == "held" for pace in paces):
        return None
    end = opened_at + median(before)
    share = min((pace.share for pace in paces), default=0.0)
    if share >= MIN_SHARE:
        by_pace = max((_end(pace, opened_at, now) for pace in paces if not pace.over), default=now)
        end = (1 - share) * end + share * by_pace
    return min(max(end, now), deadline_at)


def _end(pace: TaskPace, opened_at: float, now: float) -> float:
    began_at = opened_at if pace.began_at is None else pace.began_at
    return began_at + (now - began_at) / pace.share
