"""Offers of evaluations, of versions on workers' held-out data or on the central data set."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.conductor.liveness import Liveness, require
from tessera.coordinator.db import audit, versions
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.snapshots import central_due, eligible, evaluators, sites_due, terms_of
from tessera.coordinator.db.tables import RunRow, TaskRow
from tessera.coordinator.db.transitions import ACTOR, cancel_tasks, new_task
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.snapshot import PendingEvaluation
from tessera.coordinator.domain.workers import LiveWorker, ids, in_study
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import Plan
from tessera.shared.rounds.planning import evaluation_seed, rehearsal_plans, training_seed
from tessera.shared.rounds.versions import States


def offer_evaluations(
    session: Session,
    now: float,
    run_id: str,
    due: Sequence[PendingEvaluation],
    liveness: Liveness,
    plans: Mapping[str, Plan],
) -> list[str]:
    """Offer versions to the named workers, or each to the central worker with the fewest tries. Return the workers.
    `plans` are a rehearsal's plans, by worker.

    Raises Conflict if none of them is to be evaluated any more.
    """
    run = session.get_one(RunRow, run_id)
    invited = terms_of(session, run.id, run.changes)
    live = in_study(run.study, liveness.workers(session))
    here = ids(live) if liveness.is_settled() else None
    still = {*central_due(session, run, invited.spec, here), *sites_due(session, run, invited, live)}
    central, by_id = evaluators(invited, live), {worker.id: worker for worker in live}
    asked = []
    for one in due:
        if one in still and (one.worker or central):
            worker = by_id[one.worker] if one.worker else _least_tried(session, invited, one.version, central)
            _offer(session, now, run, one, worker, plans.get(worker.name))
            asked.append(worker.id)
    require(bool(asked), "the versions are no longer to be evaluated, or by no worker that is live")
    return asked


def plans_to_rehearse(database: Database, states: States, liveness: Liveness, run_id: str) -> Mapping[str, Plan]:
    """Return the first round's plan of each worker of a rehearsal; none for any other run. Raises as `plan_round`."""
    with database.snapshot() as session:
        invited, base = terms_of(session, run_id), versions.latest_version(session, run_id)
        if not invited.spec.rehearsal:
            return {}
        able = eligible(invited, liveness.workers(session))
    spec, model = invited.spec.trained, states.model(invited.spec.model)
    state = states.load(model, states.manifest(base.digest), base.number)
    return rehearsal_plans(spec, model, state, [worker.participant(spec.dataset) for worker in able])


def _least_tried(session: Session, invited: RunTerms, version: int, central: Sequence[LiveWorker]) -> LiveWorker:
    """Return the worker with the fewest attempts to evaluate a version on the central data set."""
    kin = (TaskRow.run_id == invited.run) & (TaskRow.kind == invited.spec.asks) & ~TaskRow.held_out
    tries = Counter(session.scalars(select(TaskRow.worker_id).where(kin, TaskRow.version_number == version)))
    return min(central, key=lambda worker: tries[worker.id])


def _offer(
    session: Session, now: float, run: RunRow, due: PendingEvaluation, worker: LiveWorker, planned: Plan | None
) -> None:
    """Offer an evaluation to a worker in place of an obsolete one: on the central data set another worker's of this
    version, at a site that of an earlier version."""
    spec = RunSpec.model_validate(run.spec)
    at_site, held_out = due.worker is not None, due.worker is not None and spec.asks == "evaluate"
    kin = (TaskRow.run_id == run.id) & (TaskRow.kind == spec.asks) & (TaskRow.held_out == held_out)
    if at_site:
        kin &= TaskRow.worker_id == worker.id
    same = kin & (TaskRow.version_number == due.version)
    replaced = (kin if at_site else same) & TaskRow.state.in_(("offered", "expired"))
    cancel_tasks(session, now, replaced, {})
    plan = planned or Plan(stage=spec.asks)
    seed = training_seed(spec, 1, worker.name) if spec.rehearsal else evaluation_seed(spec, due.version)
    attempts = session.scalar(select(func.max(TaskRow.attempts)).where(same)) or 0
    columns: dict[str, Any] = {"held_out": held_out, "seed": seed, "attempts": attempts}
    task = new_task(session, now, run, worker.id, plan, kind=spec.asks, version_number=due.version, **columns)
    about = {"version": due.version, "worker": worker.name, "held_out": held_out}
    audit.record(session, now, ACTOR, f"task.{spec.asks}", task.id, run_id=run.id, **about)


def cancel_evaluations(session: Session, now: float, run_id: str) -> None:
    asked = terms_of(session, run_id).spec.asks
    cancel_tasks(session, now, (TaskRow.run_id == run_id) & (TaskRow.kind == asked), {})
