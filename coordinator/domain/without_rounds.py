"""Decisions on a run without rounds: it asks each site for one task, and ends with the sites' answers."""

from collections.abc import Iterator
from dataclasses import dataclass

from tessera.coordinator.domain.leases import may_report
from tessera.coordinator.domain.snapshot import RunSnapshot, Timeouts
from tessera.coordinator.domain.sum_helpers import Pause


@dataclass(frozen=True)
class Complete:
    """End a run after its last round, or with the answers that came."""

    reason: str | None = None


def end_of(run: RunSnapshot, now: float, timeouts: Timeouts) -> Iterator[Complete | Pause]:
    """Yield the end of a run without rounds, or a pause if fewer sites than its quorum answered.

    Before the deadline it waits for each task that may still be answered, for further sites as long as for a cohort,
    and for sites where a person has not approved the run.
    """
    answers = run.answers
    if answers is None:
        return
    waited, quorum = now - run.idle_since, run.cohort.quorum
    late = waited >= run.cohort.deadline_seconds
    coming = any(may_report(task, run.cohort.max_task_attempts) for task in run.evaluations)
    awaited = coming or run.unevaluated or answers.withheld or waited < timeouts.cohort_wait_seconds
    if awaited and not late and not (answers.is_full and not coming):
        return
    said = f"{answers.answered} of {answers.asked} sites answered{' by the deadline' if late else ''}"
    if answers.answered >= quorum:
        yield Complete(None if answers.answered == answers.asked and not run.unevaluated else said)
    elif late or answers.asked >= quorum:
        failed = f" ({', '.join(answers.failed)})" if answers.failed else ""
        yield Pause(f"{said}{failed}; the quorum is {quorum}")
