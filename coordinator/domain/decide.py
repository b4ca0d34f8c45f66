"""Decisions on the next actions of a run: the only place where a round changes its state.

    decide(snapshot, now, timeouts) -> actions

Pure and total: it decides from one snapshot. The conductor executes each action, guarded by the snapshot's state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from tessera.coordinator.domain.arrivals import sites_in_time
from tessera.coordinator.domain.buffered import buffered, sites_are_done
from tessera.coordinator.domain.leases import LeaseAction, MoveBack, lease_actions, may_report
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.round_moves import Abandon, Adopt, Close, Merge, Open, RoundAction
from tessera.coordinator.domain.snapshot import PendingEvaluation, RoundSnapshot, RunSnapshot, Timeouts
from tessera.coordinator.domain.sum_helpers import AskHelpers, Pause, sum_actions
from tessera.coordinator.domain.without_rounds import Complete, end_of

RETRY_SECONDS = (1.0, 10.0, 60.0)
"""Time before the first, second and each later repetition of an abandoned round: its cause may pass by itself."""

MAX_RETRY_WAITS = 6
"""Upper limit of that time, in waits for a cohort: who makes those shorter is in a hurry."""


@dataclass(frozen=True)
class Evaluate:
    """Offer evaluations of versions on workers' held-out data, or on the central data set."""

    due: tuple[PendingEvaluation, ...]


@dataclass(frozen=True)
class CancelEvaluations:
    """Cancel the evaluations of a run that ended, and its helpers' tasks."""


Action = RoundAction | MoveBack | LeaseAction | AskHelpers | Evaluate | CancelEvaluations | Pause | Complete


def decide(run: RunSnapshot, now: float, timeouts: Timeouts) -> list[Action]:
    """Return the actions that are due in a run, in order."""
    if run.state not in LIVE_RUN:
        return list(_wind_up(run))
    if run.idle_since > now + timeouts.lease_seconds:
        return [MoveBack()]
    leases, moves = list(_leases(run, now, timeouts.lease_seconds)), list[Action]()
    if run.round and run.adopts and run.round.state == "open":
        moves = [Abandon(run.round.id, "the parent has gone on to another version")]
    elif run.round:
        moves = list(_end_of(run.round, run, now))
    elif run.state == "running":
        moves = list(end_of(run, now, timeouts) if run.answers else _after_a_round(run, now, timeouts))
    # A site evaluates its own model before the next round changes it. A run that ends or pauses asks for nothing.
    is_over = any(isinstance(move, Complete | Pause) for move in moves)
    return [*leases, *(() if is_over else _evaluations(run)), *moves]


def _wind_up(run: RunSnapshot) -> Iterator[Action]:
    if run.round:
        yield Abandon(run.round.id, f"the run was {run.state}")
    if run.evaluations or run.abandoning:
        yield CancelEvaluations()


def _leases(run: RunSnapshot, now: float, lease_seconds: float) -> Iterator[Action]:
    tasks = run.round.tasks if run.round and run.round.state == "open" else ()
    # An evaluation of an absent worker is not offered to it again.
    evaluations = (task for task in run.evaluations if task.state == "leased" or task.present)
    yield from lease_actions((*tasks, *evaluations), run.cohort.max_task_attempts, now, lease_seconds)
    sums = run.round.sums if run.round and run.round.state == "merging" else None
    helpers = (*run.abandoning, *((*sums.agree, *sums.openings) if sums and not sums.is_open else ()))
    # No other site can do a helper's task, so it is offered again without a limit of attempts.
    yield from lease_actions(helpers, inf, now, lease_seconds)


def _evaluations(run: RunSnapshot) -> Iterator[Action]:
    may_ask = run.answers is None or run.state == "running"
    if may_ask and (due := tuple(one for one in run.unevaluated if one.worker is not None or run.evaluators)):
        yield Evaluate(due)


def _end_of(round_: RoundSnapshot, run: RunSnapshot, now: float) -> Iterator[Action]:
    """Yield the next step of a live round: close it, abandon it, or merge it once it is closed."""
    if round_.state == "merging":
        if round_.sums is None or round_.sums.is_open:
            yield Merge(round_.id)
        elif run.state == "running":
            yield from sum_actions(round_.id, round_.number, round_.sums)
        return
    # A site counts once, when an update of one of its workers is accepted.
    came = {task.site for task in round_.tasks if task.state == "accepted"}
    waiting = {task.site for task in round_.tasks if may_report(task, run.cohort.max_task_attempts)}
    lack, over = run.cohort.lack(came), "all tasks ended"
    if run.cohort.adaptive_deadline and not lack and waiting:
        waiting = sites_in_time(round_, run.cohort.max_task_attempts, now)
        over = "the other sites take longer than usual"
    if run.cohort.enough and len(came) >= run.cohort.enough and not lack:
        yield Close(round_.id, f"{len(came)} updates are enough")
    elif run.cohort.buffers:
        yield from buffered(round_, run, now, came, waiting, over)
    elif waiting and not run.cohort.lack(came | waiting) and now < round_.deadline_at:
        return
    elif not lack:
        yield Close(round_.id, "the deadline came" if waiting else over)
    else:
        cause = "by the deadline" if now >= round_.deadline_at else "and no more can come"
        asked = len({task.site for task in round_.tasks})
        yield Abandon(round_.id, f"{len(came)} of {asked} updates came {cause}; {lack}")


def _after_a_round(run: RunSnapshot, now: float, timeouts: Timeouts) -> Iterator[Action]:
    """Yield the next step between rounds: a round, the end, or a pause with a reason for people."""
    waited, because = now - run.idle_since, run.abandoned_because
    if run.adopts:
        yield Adopt()
    elif run.version >= run.rounds:
        coming = any(may_report(task, run.cohort.max_task_attempts) for task in run.evaluations)
        last_due = any(_evaluations(run))
        if not (coming or last_due) or waited > timeouts.evaluation_seconds:
            yield Complete()
    elif run.done and run.eligible < run.cohort.quorum and waited >= timeouts.cohort_wait_seconds:
        yield Pause(sites_are_done(run))
    elif run.abandoned >= run.cohort.max_attempts:
        yield Pause(f"round {run.version + 1} was abandoned {run.abandoned} times, at last because {because}")
    elif run.abandoned and 0 <= waited < min(
        RETRY_SECONDS[min(run.abandoned, len(RETRY_SECONDS)) - 1], MAX_RETRY_WAITS * timeouts.cohort_wait_seconds
    ):
        return
    elif not run.awaits_parent and run.eligible >= _sites_awaited(run, waited, timeouts):
        yield Open(run.version + 1)


def _sites_awaited(run: RunSnapshot, waited: float, timeouts: Timeouts) -> float:
    """Return the number of eligible sites with which the next round opens now."""
    quorum, size = run.cohort.quorum, run.cohort.asked
    if waited >= timeouts.cohort_wait_seconds or (size is None and run.goes_on):
        return quorum
    # Without a size the number of sites is unknown, so further ones get time to appear.
    return inf if size is None else max(size, quorum)
