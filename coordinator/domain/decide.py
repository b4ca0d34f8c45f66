"""Decisions on the next actions of a run: the only place where a round changes its state.

    decide(snapshot, now) -> actions

Pure and total: it decides from one snapshot. The conductor executes each action, guarded by the snapshot's state.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.snapshot import (
    PendingEvaluation,
    RoundSnapshot,
    RunSnapshot,
    SumsSnapshot,
    TaskSnapshot,
)
from tessera.shared.api.secure_sums import HelperKind

RETRY_SECONDS = (1.0, 10.0, 60.0)
"""Time before the first, second and each later repetition of an abandoned round: its cause may pass by itself."""

MAX_RETRY_WAITS = 6
"""Upper limit of that time, in waits for a cohort: who makes those shorter is in a hurry."""

MANY = 1 << 30
"""Attempts at a task without a limit."""


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


@dataclass(frozen=True)
class Open:
    number: int


@dataclass(frozen=True)
class Close:
    round: str
    reason: str


@dataclass(frozen=True)
class Merge:
    round: str


@dataclass(frozen=True)
class AskHelpers:
    """Offer helpers of a closed round tasks of a kind: to sign the set of senders, or to open their sums."""

    round: str
    kind: HelperKind


@dataclass(frozen=True)
class Abandon:
    round: str
    reason: str


@dataclass(frozen=True)
class Evaluate:
    """Offer an evaluation of a version on a worker's held-out data, or on the central data set."""

    due: PendingEvaluation


@dataclass(frozen=True)
class CancelEvaluations:
    """Cancel the evaluations of a run that ended, and its helpers' tasks."""


@dataclass(frozen=True)
class Pause:
    reason: str


@dataclass(frozen=True)
class Complete:
    pass


Action = (
    Expire
    | Shorten
    | Offer
    | Open
    | Close
    | AskHelpers
    | Merge
    | Abandon
    | Evaluate
    | CancelEvaluations
    | Pause
    | Complete
)


@dataclass(frozen=True)
class Timeouts:
    """Time limits of waiting for workers, in seconds."""

    cohort_wait_seconds: float
    """For the full cohort, or for further sites, once there is a quorum."""
    evaluation_seconds: float
    """For the last evaluations, once all rounds are done."""
    lease_seconds: float
    """The length of a lease, which its worker renews."""


def decide(run: RunSnapshot, now: float, patience: Timeouts) -> list[Action]:
    if run.state not in LIVE_RUN:
        return list(_wind_up(run))
    leases, moves = list(_leases(run, now, patience)), []
    if run.round:
        moves = list(_round(run.round, run, now, patience))
    elif run.state == "running":
        moves = list(_next(run, now, patience))
    if Complete() in moves:
        return [*leases, *moves]
    # A site evaluates its own model before the next round changes it.
    return [*leases, *_evaluations(run), *moves]


def _wind_up(run: RunSnapshot) -> Iterator[Action]:
    if run.round:
        yield Abandon(run.round.id, f"the run was {run.state}")
    if run.evaluations or run.abandoning:
        yield CancelEvaluations()


def _leases(run: RunSnapshot, now: float, patience: Timeouts) -> Iterator[Action]:
    """Yield the expiry of leases past their end, and offers of expired tasks with attempts left."""
    open_tasks = run.round.tasks if run.round and run.round.state == "open" else ()
    # An evaluation of an absent worker is not offered to it again.
    evaluations = (task for task in run.evaluations if task.state == "leased" or task.present)
    for task in (*open_tasks, *evaluations):
        yield from _lease(task, run.cohort.max_task_attempts, now, patience)
    yield from _helper_leases(run.abandoning, now, patience)


def _helper_leases(tasks: Iterable[TaskSnapshot], now: float, patience: Timeouts) -> Iterator[Action]:
    """Yield the expiry of helpers' leases, and offers again without a limit of attempts."""
    for task in tasks:
        yield from _lease(task, MANY, now, patience)


def _lease(task: TaskSnapshot, most_attempts: int, now: float, patience: Timeouts) -> Iterator[Action]:
    expires_at, lease_seconds = task.lease_expires_at or 0, patience.lease_seconds
    if task.state == "leased" and expires_at <= now:
        yield Expire(task.id, task.token)
    elif task.state == "leased" and expires_at > now + 2 * lease_seconds:
        # The clocks of the processes that renew and that end leases may differ by less.
        yield Shorten(task.id, task.token, now + lease_seconds)
    elif task.state == "expired" and task.attempts < most_attempts:
        yield Offer(task.id)


def _evaluations(run: RunSnapshot) -> Iterator[Action]:
    for due in run.unevaluated:
        if due.worker is not None or run.evaluators:
            yield Evaluate(due)


def _round(round_: RoundSnapshot, run: RunSnapshot, now: float, patience: Timeouts) -> Iterator[Action]:
    if round_.state == "merging":
        if round_.sums is None or round_.sums.is_open:
            yield Merge(round_.id)
        else:
            yield from _opening(round_, round_.sums, run, now, patience)
        return
    # A site counts once, when an update of one of its workers is accepted.
    came = {task.site for task in round_.tasks if task.state == "accepted"}
    waiting = {task.site for task in round_.tasks if _may_come(task, run.cohort.max_task_attempts)}
    quorum = run.cohort.quorum
    if run.cohort.target_updates and len(came) >= max(run.cohort.target_updates, quorum):
        yield Close(round_.id, f"{len(came)} updates are enough")
    elif waiting and len(came | waiting) >= quorum and now < round_.deadline_at:
        return
    elif len(came) >= quorum:
        yield Close(round_.id, "the deadline came" if waiting else "all tasks ended")
    else:
        cause = "by the deadline" if now >= round_.deadline_at else "and no more can come"
        asked = len({task.site for task in round_.tasks})
        yield Abandon(round_.id, f"{len(came)} of {asked} updates came {cause}; the quorum is {quorum}")


def _opening(
    round_: RoundSnapshot, sums: SumsSnapshot, run: RunSnapshot, now: float, patience: Timeouts
) -> Iterator[Action]:
    """Yield the next step towards the sums of a closed round. It has no deadline here, since what a helper has signed
    cannot be signed otherwise; but helpers erase the keys that open it (`worker.state.site_keys.ERASE_SECONDS`)."""
    yield from _helper_leases((*sums.agree, *sums.openings), now, patience)
    if run.state != "running":
        return
    signed = sum(task.state == "accepted" for task in sums.agree)
    failed = sum(task.state == "failed" for task in sums.agree)
    if signed >= sums.signatures:
        if not any(task.state != "accepted" and _may_come(task, MANY) for task in sums.openings):
            yield AskHelpers(round_.id, "open")
    elif len(sums.agree) < sums.helpers:
        yield AskHelpers(round_.id, "agree")
    elif sums.helpers - failed < sums.signatures:
        yield Pause(f"{failed} helpers did not sign the senders of round {round_.number}: see their tasks")


def _may_come(task: TaskSnapshot, tries: int) -> bool:
    """Return whether a report on a task is possible: it is leased, or available to a present worker."""
    to_be_had = task.state == "offered" or (task.state == "expired" and task.attempts < tries)
    return task.state == "leased" or (to_be_had and task.present)


def _next(run: RunSnapshot, now: float, patience: Timeouts) -> Iterator[Action]:
    """Yield the next step between rounds: a round, the end, or a pause with a reason for people."""
    waited, because = now - run.idle_since, run.abandoned_because
    if run.version >= run.rounds:
        coming = any(_may_come(task, run.cohort.max_task_attempts) for task in run.evaluations)
        last_due = any(_evaluations(run))
        if not (coming or last_due) or waited > patience.evaluation_seconds:
            yield Complete()
    elif run.abandoned >= run.cohort.max_attempts:
        yield Pause(f"round {run.version + 1} was abandoned {run.abandoned} times, at last because {because}")
    elif run.abandoned and 0 <= waited < min(
        RETRY_SECONDS[min(run.abandoned, len(RETRY_SECONDS)) - 1], MAX_RETRY_WAITS * patience.cohort_wait_seconds
    ):
        return
    elif run.eligible >= run.cohort.quorum and (
        # Without a cohort size the number of sites is unknown, so further ones get time to appear.
        (run.cohort.size is not None and run.eligible >= run.cohort.size) or waited >= patience.cohort_wait_seconds
    ):
        yield Open(run.version + 1)
