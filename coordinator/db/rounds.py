"""The conductor's writes: opening, merging and ending rounds."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import ColumnElement, Row, func, select, update
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session, load_only

from tessera.coordinator.db import audit
from tessera.coordinator.db.inserts import insert_missing
from tessera.coordinator.db.snapshots import sites_due, terms_of
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    TaskRow,
    VersionRow,
    WorkerRow,
    new_id,
)
from tessera.coordinator.db.transitions import move_round, move_task, move_tasks
from tessera.coordinator.domain.lifecycle import TASK
from tessera.coordinator.domain.snapshot import PendingEvaluation
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.secure_sums import HELPER_KINDS, HelperKind, SumTask
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.metrics.selections import RECENT, Choices, choices
from tessera.shared.privacy.noise import secret_key
from tessera.shared.problems import Conflict, WorkerFailed
from tessera.shared.rounds.aggregate import Accepted, Merged
from tessera.shared.rounds.planning import bounds_of, evaluation_seed, training_seed

ACTOR = "conductor"

MAX_NAMED = 5
"""Workers that the reason of an abandoned round names."""

_LAST_ATTEMPT = select(func.max(RoundRow.attempt)).where(
    RoundRow.run_id == given("run"), RoundRow.number == given("number")
)
_ANY_OF = TaskRow.id.in_(given("ids", expanding=True))
_IN_ROUND = TaskRow.round_id == given("round")
_ACCEPTED = _IN_ROUND & (TaskRow.state == "accepted")
_ASSIGNED = (TaskRow.run_id == given("run")) & (TaskRow.merged_in == given("number"))
_OPEN_TASKS = (
    select(TaskRow).where(TaskRow.state.in_(TASK["cancel"].sources)).order_by(TaskRow.created_at, TaskRow.id)
)
_PROBLEMS = (
    select(WORKER_NAME, TaskRow.problem)
    .join_from(TaskRow, WorkerRow)
    .join(SiteRow)
    .where(_IN_ROUND)
    .order_by(SiteRow.name, WorkerRow.name)
)
_ASSIGN = update(TaskRow).where(_ACCEPTED).returning(TaskRow.update_digest)
_UPDATES = (
    select(TaskRow, WORKER_NAME, SiteRow.name, VersionRow.digest)
    .join_from(TaskRow, WorkerRow)
    .join(SiteRow)
    .join(VersionRow, (VersionRow.run_id == TaskRow.run_id) & (VersionRow.number == TaskRow.version_number))
)
_ACCEPTED_UPDATES, _ASSIGNED_UPDATES = _UPDATES.where(_ACCEPTED), _UPDATES.where(_ASSIGNED)
_CHOSEN = (
    select(TaskRow.merged_in, SiteRow.name, TaskRow.layers)
    .join_from(TaskRow, WorkerRow)
    .join(SiteRow)
    .where(TaskRow.run_id == given("run"), TaskRow.merged_in.between(given("first"), given("last")))
    .where(TaskRow.state == "merged")
    .order_by(TaskRow.merged_in)
)
_OUTCOMES = (
    select(TaskRow, WORKER_NAME)
    .join_from(TaskRow, WorkerRow)
    .join(SiteRow)
    .where(_ASSIGNED)
    .options(load_only(TaskRow.metrics, TaskRow.unmerged))
)


@dataclass(frozen=True)
class MergedRound:
    """The result of merging a round's updates."""

    version: VersionRef
    manifest: Manifest
    kept: AbstractSet[str]
    """The blobs of the version before it."""
    scalars: Mapping[str, float]
    """Of the manifest, and of its sites' selection of layers."""
    warnings: Sequence[str]
    merged: Merged
    scores: Mapping[str, Mapping[str, float]]
    """By worker."""


@dataclass(frozen=True)
class RoundSums:
    """The secure sums of a round that is about to open."""

    terms: str
    """The blob of their terms."""
    values: str | None
    """The values of the model that the sites train from; None unless the sums are exact."""


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
        stage=plans[planned[0].name].stage,
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
    for worker in planned:
        plan, seed = plans[worker.name], training_seed(spec, number, worker.name)
        session.add(_task(now, run, worker, run.version_number, plan, kind="train", round_id=round_.id, seed=seed))
    about: dict[str, Any] = {"number": number, "cohort": [worker.name for worker in planned]}
    if run.bounds is None:
        bounds = bounds_of(spec, [worker.participant(spec.dataset) for worker in willing])
        run.bounds = about["bounds"] = bounds.model_dump()
    audit.record(session, now, ACTOR, "round.open", round_.id, run_id=run.id, **about)
    return [worker.id for worker in planned]


def next_attempt(session: Session, run_id: str, number: int) -> int:
    """Return the number of the next attempt at a round."""
    return (session.scalar(_LAST_ATTEMPT, {"run": run_id, "number": number}) or 0) + 1


def offer_evaluation(session: Session, now: float, run: RunRow, due: PendingEvaluation, worker: LiveWorker) -> None:
    """Offer an evaluation to a worker in place of an obsolete one: on the central data set another worker's of this
    version, at a site that of an earlier version."""
    spec = RunSpec.model_validate(run.spec)
    held_out = due.worker is not None
    kin = (TaskRow.run_id == run.id) & (TaskRow.kind == "evaluate") & (TaskRow.held_out == held_out)
    if held_out:
        kin &= TaskRow.worker_id == worker.id
    same = kin & (TaskRow.version_number == due.version)
    replaced = (kin if held_out else same) & TaskRow.state.in_(("offered", "expired"))
    cancel_tasks(session, now, replaced, {})
    plan, seed = Plan(stage="evaluate"), evaluation_seed(spec, due.version)
    attempts = session.scalar(select(func.max(TaskRow.attempts)).where(same)) or 0
    columns = {"kind": "evaluate", "held_out": held_out, "seed": seed, "attempts": attempts}
    task = _task(now, run, worker, due.version, plan, **columns)
    session.add(task)
    about = {"version": due.version, "worker": worker.name, "held_out": held_out}
    audit.record(session, now, ACTOR, "task.evaluate", task.id, run_id=run.id, **about)


def offer_at_sites(session: Session, now: float, run: RunRow, live: Sequence[LiveWorker]) -> list[str]:
    """Offer the run's latest due version to each worker at a site that lacks it; returns their ids."""
    due = sites_due(session, run, terms_of(session, run.id, run.changes), live)
    by_id = {worker.id: worker for worker in live}
    asked = [(one, by_id[one.worker]) for one in due if one.worker]
    for one, worker in asked:
        offer_evaluation(session, now, run, one, worker)
    return [worker.id for _, worker in asked]


def tries_by_worker(session: Session, run_id: str, version: int) -> Counter[str]:
    """Return the number of each worker's attempts to evaluate a version on the central data set."""
    kin = (TaskRow.run_id == run_id) & (TaskRow.kind == "evaluate") & ~TaskRow.held_out
    return Counter(session.scalars(select(TaskRow.worker_id).where(kin, TaskRow.version_number == version)))


def _task(now: float, run: RunRow, worker: LiveWorker, version: int, plan: Plan, **columns: Any) -> TaskRow:
    document = plan.model_dump(mode="json")
    about = {"run_id": run.id, "worker_id": worker.id, "version_number": version, "plan": document}
    return TaskRow(id=new_id(), created_at=now, **about, **columns)


def offer_helper(
    session: Session, now: float, run: RunRow, kind: HelperKind, worker_id: str, site: str, request: SumTask
) -> None:
    """Offer a task of the run's present round to a helper of its secure sums."""
    plan = Plan(stage=kind).model_dump(mode="json")
    about: dict[str, Any] = {"run_id": run.id, "worker_id": worker_id, "version_number": run.version_number}
    task = TaskRow(id=new_id(), created_at=now, plan=plan, kind=kind, seed=0, **about)
    task.sums = request.model_dump(mode="json")
    session.add(task)
    noted = {"version": run.version_number, "site": site, "seeds": list(request.seeds)}
    audit.record(session, now, ACTOR, f"task.{kind}", task.id, run_id=run.id, **noted)


def withdraw_helpers(session: Session, now: float, run_id: str, kinds: Sequence[HelperKind] = HELPER_KINDS) -> None:
    """Cancel the unfinished tasks of a run's helpers."""
    cancel_tasks(session, now, (TaskRow.run_id == run_id) & TaskRow.kind.in_(kinds), {})


def cancel_tasks(session: Session, now: float, which: ColumnElement[bool], parameters: Mapping[str, Any]) -> None:
    """Cancel those of these tasks that are open; `parameters` are for the parameters of the condition."""
    for task in session.scalars(_OPEN_TASKS.where(which), parameters).all():
        move_task(session, now, ACTOR, task, "cancel")


def cancel_evaluations(session: Session, now: float, run_id: str) -> None:
    cancel_tasks(session, now, (TaskRow.run_id == run_id) & (TaskRow.kind == "evaluate"), {})


def close_round(session: Session, now: float, round_: RoundRow, reason: str) -> list[str]:
    """Close a round to updates, and assign the accepted ones to the next version. Return their digests, sorted."""
    move_round(session, now, ACTOR, round_, "close", reason)
    cancel_tasks(session, now, _IN_ROUND, {"round": round_.id})
    assigned = session.connection().execute(_ASSIGN, {"round": round_.id, "merged_in": round_.number})
    return sorted(digest or "" for digest in assigned.scalars())


def abandon_round(session: Session, now: float, round_: RoundRow, reason: str) -> None:
    """Abandon a round: its accepted updates are left out. The reason names the workers that failed, with codes."""
    rows = session.execute(_PROBLEMS, {"round": round_.id})
    failed = [f"{worker}: {_code_of(problem)}" for worker, problem in rows if problem]
    more = [f"{len(failed) - MAX_NAMED} more"] if len(failed) > MAX_NAMED else []
    reason += f" ({', '.join([*failed[:MAX_NAMED], *more])})" if failed else ""
    move_round(session, now, ACTOR, round_, "abandon", reason)
    round_.noise_key = None
    cancel_tasks(session, now, _IN_ROUND, {"round": round_.id})
    move_tasks(session, "leave_out", _IN_ROUND, {"round": round_.id}, merged_in=None)
    if round_.sum_terms:
        withdraw_helpers(session, now, round_.run_id)


def _code_of(problem: Mapping[str, Any]) -> str:
    """Return a problem's code, or that of the worker whose words it has."""
    if problem["code"] != WorkerFailed.code:
        return str(problem["code"])
    code = str(problem["detail"]).partition(":")[0]
    return code if re.fullmatch(r"[a-z0-9-]{1,64}", code) else WorkerFailed.code


def bounds_in_force(run: RunRow) -> Bounds:
    """Return what was fixed when the run's first round opened."""
    return Bounds.model_validate(run.bounds)


def assigned_updates(session: Session, run_id: str, number: int, open_round: str | None = None) -> list[Accepted]:
    """Return the updates that were assigned to a version, or that closing the round `open_round` would assign."""
    if open_round:
        rows = session.execute(_ACCEPTED_UPDATES, {"round": open_round})
    else:
        rows = session.execute(_ASSIGNED_UPDATES, {"run": run_id, "number": number})
    # An accepted task has a digest and a count: they are written together with that state.
    return [
        Accepted(
            site=site,
            worker=worker,
            digest=task.update_digest or "",
            examples=task.examples or 0,
            metrics=task.metrics,
            plan=Plan.model_validate(task.plan),
            base=VersionRef(number=task.version_number, digest=base),
            layers=task.layers,
        )
        for task, worker, site, base in rows
    ]


def earlier_choices(session: Session, run_id: str, number: int) -> list[Choices]:
    """Return the layers that each site chose for each of the `RECENT` versions before this one, in order."""
    rows = session.execute(_CHOSEN, {"run": run_id, "first": number - RECENT, "last": number - 1})
    return [choices((site, layers) for _, site, layers in of_one) for _, of_one in groupby(rows, itemgetter(0))]


def _outcomes(session: Session, run_id: str, number: int) -> Sequence[Row[TaskRow, str]]:
    """Return the tasks assigned to a version, without their plans, and their workers."""
    return session.execute(_OUTCOMES, {"run": run_id, "number": number}).all()


def note_scores(session: Session, run_id: str, number: int, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Add the scores of each update that was assigned to a version to its numbers."""
    for task, worker in _outcomes(session, run_id, number):
        task.metrics = {**task.metrics, **scores.get(worker, {})}


def _note_outcomes(session: Session, run_id: str, number: int, result: MergedRound) -> list[str]:
    """Record the scores of a version's updates, and which were merged in part or left out; return the tasks left
    out."""
    left_out = []
    for task, worker in _outcomes(session, run_id, number):
        if worker in result.scores:
            task.metrics = {**task.metrics, **result.scores[worker]}
        unmerged = result.merged.get(worker)
        if unmerged is None:
            left_out.append(task.id)
        elif unmerged:
            task.unmerged = list(unmerged)
    if left_out:
        move_tasks(session, "leave_out", _ANY_OF, {"ids": left_out})
    return sorted(left_out)


def add_version(
    session: Session,
    now: float,
    run_id: str,
    ref: VersionRef,
    manifest: Manifest,
    warnings: Sequence[str],
    kept: AbstractSet[str] = frozenset(),
    scalars: Mapping[str, float] | None = None,
) -> list[str]:
    """Add a version whose blobs are recorded; those that are `kept` from the version before are the run's already.

    Return the warnings that the previous version did not have, which are also audited.
    """
    before = session.get(VersionRow, (run_id, ref.number - 1)) if warnings else None
    row = VersionRow(run_id=run_id, number=ref.number, digest=ref.digest, created_at=now)
    row.scalars, row.warnings = dict(manifest.scalars if scalars is None else scalars), list(warnings)
    session.add(row)
    news = [warning for warning in warnings if not before or warning not in before.warnings]
    if news:
        about = {"number": ref.number, "warnings": news}
        audit.record(session, now, ACTOR, "version.warning", ref.digest, run_id=run_id, **about)
    wanted = {ref.digest, *manifest.digests} - kept
    insert_missing(session, RunBlobRow, [{"run_id": run_id, "digest": digest} for digest in sorted(wanted)])
    return news


def commit_round(
    session: Session,
    now: float,
    run: RunRow,
    round_: RoundRow,
    result: MergedRound,
) -> list[str]:
    """Record the round's end, its version and its merged updates in the caller's transaction. Return the new
    warnings."""
    version = result.version
    left_out = _note_outcomes(session, run.id, version.number, result)
    move_round(session, now, ACTOR, round_, "commit", round_.reason, left_out=left_out)
    round_.noise_key = None
    assigned = {"run": run.id, "number": version.number}
    if move_tasks(session, "merge", _ASSIGNED, assigned) != len(result.merged):
        raise Conflict("other updates were assigned to the version than were merged")
    about = result.warnings, result.kept, result.scalars
    news = add_version(session, now, run.id, version, result.manifest, *about)
    if round_.sum_terms:
        withdraw_helpers(session, now, run.id)
    run.version_number = version.number
    run.revision += 1
    run.updated_at = now
    session.flush()
    audit.record(session, now, ACTOR, "version", version.digest, run_id=run.id, number=version.number)
    return news
