"""Decisions on the leases of tasks: end those past their end, and offer expired tasks again. The actions after the
clock was set back are here too."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tessera.coordinator.domain.snapshot import TaskSnapshot


@dataclass(frozen=True)
class Expire:
    """Expire a lease past its end."""

    task: str
    token: int


@dataclass(frozen=True)
class Shorten:
    """Let a lease end at `expires_at`: it would last longer than any, since the clock was set back."""

    task: str
    token: int
    expires_at: float


@dataclass(frozen=True)
class Offer:
    """Offer an expired task again."""

    task: str


LeaseAction = Expire | Shorten | Offer


@dataclass(frozen=True)
class MoveBack:
    """Move a run's instants back: the latest lies ahead, by more than the clocks of two processes differ, and to wait
    for it would stop the run for as long as the clock was set back."""


def lease_actions(
    tasks: Iterable[TaskSnapshot], max_attempts: float, now: float, lease_seconds: float
) -> Iterator[LeaseAction]:
    """Yield the expiry of leases past their end, and offers of expired tasks with attempts left."""
    for task in tasks:
        expires_at = task.lease_expires_at or 0
        if task.state == "leased" and expires_at <= now:
            yield Expire(task.id, task.token)
        elif task.state == "leased" and expires_at > now + 2 * lease_seconds:
            # The clocks of the processes that renew and that end leases may differ by less.
            yield Shorten(task.id, task.token, now + lease_seconds)
        elif task.state == "expired" and task.attempts < max_attempts:
            yield Offer(task.id)


def may_report(task: TaskSnapshot, max_attempts: float) -> bool:
    """Return True if a report on a task is possible: it is leased, or available to a present worker."""
    available = task.state == "offered" or (task.state == "expired" and task.attempts < max_attempts)
    return task.state == "leased" or (available and task.present)
