"""The writes to the tasks of a run's rounds, whichever round asked for them, each within its caller's transaction."""

from collections.abc import Mapping, Sequence

from sqlalchemy import bindparam as given
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, WorkerRow, one_of
from tessera.coordinator.db.transitions import ACTOR, cancel_tasks, move_tasks, new_task
from tessera.coordinator.domain.lifecycle import LIVE_ROUND
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import Plan
from tessera.shared.problems import TaskCancelled
from tessera.shared.rounds.planning import training_seed

_LIVE = select(RoundRow).where(RoundRow.run_id == given("run"), one_of(RoundRow.state, *LIVE_ROUND))
_OF_RUN = (TaskRow.run_id == given("run")) & (TaskRow.kind == "train")
_UNMERGED = _OF_RUN & (TaskRow.state == "accepted") & TaskRow.merged_in.is_(None)
ASSIGN = update(TaskRow).where(_UNMERGED)
_OF_SITES = _OF_RUN & TaskRow.worker_id.in_(
    select(WorkerRow.id).join(SiteRow).where(SiteRow.name.in_(given("sites", expanding=True)))
)
_SPENT = _OF_RUN & (TaskRow.state == "expired") & (TaskRow.attempts >= given("most_attempts"))
_NOTE = update(RoundRow).where(RoundRow.id == given("round"), RoundRow.state == "open")
# To cancel a task that no worker began loses no work.
_IDLE = _SPENT | _OF_RUN & (TaskRow.token == 0)
_OLD = _OF_RUN & (TaskRow.version_number < given("oldest"))


def live_round(session: Session, run_id: str) -> RoundRow | None:
    """Return the run's round that is open or merging, if there is one."""
    return session.scalars(_LIVE, {"run": run_id}).one_or_none()


def offer(
    session: Session,
    now: float,
    run: RunRow,
    round_: RoundRow,
    planned: Sequence[LiveWorker],
    plans: Mapping[str, Plan],
) -> list[str]:
    """Offer a task of a round to each planned worker; return the workers' ids."""
    spec = RunSpec.model_validate(run.spec)
    if spec.cohort.buffers:
        # Out of attempts, or of an absent worker whose site has another.
        cancel_tasks(session, now, _OF_SITES, {"run": run.id, "sites": [worker.site for worker in planned]})
    for worker in planned:
        columns = {"kind": "train", "round_id": round_.id, "seed": training_seed(spec, round_.number, worker.name)}
        new_task(session, now, run, worker.id, plans[worker.name], **columns)
    return [worker.id for worker in planned]


def ask_again(
    session: Session,
    now: float,
    run: RunRow,
    round_: RoundRow,
    willing: Sequence[LiveWorker],
    plans: Mapping[str, Plan],
) -> list[str]:
    """Add a task of an open round for each planned worker; return the workers' ids."""
    planned = [worker for worker in willing if worker.name in plans]
    round_.reason = None
    about = {"number": round_.number, "cohort": [worker.name for worker in planned]}
    audit.record(session, now, ACTOR, "round.ask", round_.id, run_id=run.id, **about)
    return offer(session, now, run, round_, planned, plans)


def note_refusal(session: Session, round_id: str, reason: str) -> None:
    """Note on an open round, for people, why no idle site was asked."""
    session.connection().execute(_NOTE, {"round": round_id, "reason": reason})


def cancel_obsolete(session: Session, now: float, round_: RoundRow, cohort: Cohort, number: int) -> None:
    """Cancel the open tasks whose updates version `number` could not take, and those that no worker began."""
    because = None
    if cohort.buffers:
        most = cohort.max_staleness
        because = TaskCancelled(f"more than {most} versions were made since its own (cohort.max_staleness)")
        cancel_tasks(session, now, _IDLE, {"run": round_.run_id, "most_attempts": cohort.max_task_attempts})
    cancel_tasks(session, now, _OLD, {"run": round_.run_id, "oldest": cohort.oldest_base(number)}, because)


def end_training(session: Session, now: float, run_id: str) -> None:
    """Cancel the open tasks of a run's rounds, and leave out the updates that were not merged."""
    cancel_tasks(session, now, _OF_RUN, {"run": run_id})
    move_tasks(session, "leave_out", _OF_RUN, {"run": run_id}, merged_in=None)
