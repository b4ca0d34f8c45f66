"""The writes that open, close, commit and abandon a round, each within its caller's transaction."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam as given
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit, coverage
from tessera.coordinator.db.engine import insert_missing
from tessera.coordinator.db.helper_tasks import RoundSums, withdraw_helpers
from tessera.coordinator.db.round_tasks import ASSIGN, cancel_obsolete, end_training, offer
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    TaskRow,
    WorkerRow,
    new_id,
    select_tasks,
)
from tessera.coordinator.db.transitions import ACTOR, code_of, move_round, move_tasks
from tessera.coordinator.db.versions import ASSIGNED, add_version, note_outcomes
from tessera.coordinator.domain.eligibility import listed
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import Plan
from tessera.shared.privacy.noise import secret_key
from tessera.shared.problems import Conflict
from tessera.shared.rounds.aggregate import NextVersion
from tessera.shared.rounds.planning import bounds_of

_LAST_ATTEMPT = select(func.max(RoundRow.attempt)).where(
    RoundRow.run_id == given("run"), RoundRow.number == given("number")
)
_IN_ROUND = TaskRow.round_id == given("round")
_PROBLEMS = select_tasks(WORKER_NAME, TaskRow.problem).where(_IN_ROUND).order_by(SiteRow.name, WorkerRow.name)


def open_round(
    session: Session,
    now: float,
    run: RunRow,
    willing: Sequence[LiveWorker],
    plans: Mapping[str, Plan],
    sums: RoundSums | None = None,
) -> list[str]:
    """Open the run's next round with one task for each planned worker; return the workers' ids.

    The first round to open fixes the run's bounds from all willing workers.
    """
    spec = RunSpec.model_validate(run.spec)
    number = run.version_number + 1
    planned = [worker for worker in willing if worker.name in plans]
    round_ = RoundRow(
        id=new_id(),
        run_id=run.id,
        number=number,
        attempt=next_attempt(session, run.id, number),
        state="open",
        stage=plans[planned[0].name].stage if planned else "",
        opened_at=now,
        deadline_at=now + spec.cohort.deadline_seconds,
        noise_key=secret_key() if spec.client_privacy and not spec.secure_sums else None,
        sum_terms=sums.terms if sums else None,
        sum_values=sums.values if sums else None,
    )
    session.add(round_)
    if sums:
        insert_missing(session, RunBlobRow, [{"run_id": run.id, "digest": sums.terms}])
        withdraw_helpers(session, now, run.id, ["abandon"])
    # Rows that refer to each other only by id are written in the order of the flushes.
    session.flush()
    about: dict[str, Any] = {"number": number, "cohort": [worker.name for worker in planned]}
    if run.bounds is None:
        bounds = bounds_of(spec, [worker.participant(spec.dataset) for worker in willing])
        run.bounds = about["bounds"] = bounds.model_dump()
    audit.record(session, now, ACTOR, "round.open", round_.id, run_id=run.id, **about)
    return offer(session, now, run, round_, planned, plans)


def next_attempt(session: Session, run_id: str, number: int) -> int:
    """Return the number of the next attempt at a round."""
    return (session.scalar(_LAST_ATTEMPT, {"run": run_id, "number": number}) or 0) + 1


def close_round(session: Session, now: float, round_: RoundRow, reason: str, cohort: Cohort) -> None:
    """Close a round to updates, and assign the accepted ones to the next version. Cancel the tasks whose updates no
    later version could take."""
    move_round(session, now, ACTOR, round_, "close", reason)
    cancel_obsolete(session, now, round_, cohort, round_.number + 1)
    session.connection().execute(ASSIGN, {"run": round_.run_id, "merged_in": round_.number})


def commit_round(session: Session, now: float, run: RunRow, round_: RoundRow, made: NextVersion) -> list[str]:
    """Record the round's end, its version and its merged updates. Return the new warnings.

    Raises Conflict if other updates were assigned to the version than were merged.
    """
    version = made.ref
    left_out = note_outcomes(session, run.id, made)
    move_round(session, now, ACTOR, round_, "commit", round_.reason, left_out=left_out)
    round_.noise_key = None
    if move_tasks(session, "merge", ASSIGNED, {"run": run.id, "number": version.number}) != len(made.merged):
        raise Conflict("other updates were assigned to the version than were merged")
    if version.number >= terms_of(session, run.id, run.changes).spec.rounds:
        # No version takes them, and their workers are to measure this one.
        end_training(session, now, run.id)
    scalars = {**made.scalars, **coverage.of_version(session, run, version.number, made.merged)}
    about = made.warnings, made.kept, scalars
    news = add_version(session, now, run.id, version, made.manifest, *about)
    if round_.sum_terms:
        withdraw_helpers(session, now, run.id)
    if run.bounds is not None:
        run.bounds = made.bounds.model_dump()
    run.version_number = version.number
    run.revision += 1
    run.updated_at = now
    session.flush()
    audit.record(session, now, ACTOR, "version", version.digest, run_id=run.id, number=version.number)
    return news


def abandon_round(session: Session, now: float, round_: RoundRow, reason: str, cohort: Cohort | None = None) -> None:
    """Abandon a round: its accepted updates are left out, unless the run goes on with a `cohort` that buffers them.
    The reason names the workers that failed, with codes."""
    rows = session.execute(_PROBLEMS, {"round": round_.id})
    failed = [f"{worker}: {code_of(problem)}" for worker, problem in rows if problem]
    reason += f" ({listed(failed)})" if failed else ""
    move_round(session, now, ACTOR, round_, "abandon", reason)
    round_.noise_key = None
    if cohort and cohort.buffers:
        cancel_obsolete(session, now, round_, cohort, round_.number)
        move_tasks(session, "leave_out", ASSIGNED, {"run": round_.run_id, "number": round_.number}, merged_in=None)
    else:
        end_training(session, now, round_.run_id)
    if round_.sum_terms:
        withdraw_helpers(session, now, round_.run_id)
