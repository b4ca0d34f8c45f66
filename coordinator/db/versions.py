"""Versions, and the accepted updates that each is made of: read for its merge, and marked with its outcome."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from sqlalchemy import Row, delete, func, select
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session, load_only

from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import insert_missing
from tessera.coordinator.db.tables import (
    RUNS,
    WORKER_NAME,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    TaskRow,
    VersionRow,
    WorkerRow,
    select_tasks,
)
from tessera.coordinator.db.transitions import ACTOR, move_tasks
from tessera.shared.api.runs import Bounds
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.metrics.selections import RECENT, Choices, choices
from tessera.shared.rounds.aggregate import AcceptedUpdate, NextVersion

ASSIGNED = (TaskRow.run_id == given("run")) & (TaskRow.merged_in == given("number"))
"""The tasks whose updates were assigned to a version."""

AT_A_TIME = 500
"""Digests in one statement."""

_LATEST = RUNS.where(RunRow.id == given("run")).with_only_columns(VersionRow.number, VersionRow.digest)
_ANY_OF = TaskRow.id.in_(given("ids", expanding=True))
_SENT = select_tasks(TaskRow, WORKER_NAME, SiteRow.name, VersionRow.digest).join(
    VersionRow, (VersionRow.run_id == TaskRow.run_id) & (VersionRow.number == TaskRow.version_number)
)
_UPDATES = _SENT.where(ASSIGNED)
# Withdrawal erases the number of examples.
_MERGED = (TaskRow.run_id == given("run")) & (TaskRow.state == "merged") & TaskRow.examples.is_not(None)
_MERGED &= TaskRow.merged_in < given("number")
_LATEST_OF_SITES = (
    select(WorkerRow.site_id, func.max(TaskRow.merged_in).label("merged_in"))
    .join_from(TaskRow, WorkerRow)
    .where(_MERGED)
    .group_by(WorkerRow.site_id)
    .subquery()
)
_LATEST_UPDATES = (
    _SENT.join(
        _LATEST_OF_SITES,
        (_LATEST_OF_SITES.c.site_id == WorkerRow.site_id) & (_LATEST_OF_SITES.c.merged_in == TaskRow.merged_in),
    )
    .where(_MERGED)
    .order_by(SiteRow.name)
)
_BETWEEN = select(VersionRow.number, VersionRow.digest).where(
    VersionRow.run_id == given("run"), VersionRow.number.between(given("first"), given("last"))
)
_CHOSEN = (
    select_tasks(TaskRow.merged_in, SiteRow.name, TaskRow.layers)
    .where(TaskRow.run_id == given("run"), TaskRow.merged_in.between(given("first"), given("last")))
    .where(TaskRow.state == "merged")
    .order_by(TaskRow.merged_in)
)
_OUTCOMES = select_tasks(TaskRow, WORKER_NAME).where(ASSIGNED).options(load_only(TaskRow.metrics, TaskRow.unmerged))


_ASKED = select(TaskRow.id).where(TaskRow.run_id == given("run"), TaskRow.version_number == given("number")).limit(1)


def digests_of(session: Session, run_id: str, before: int) -> Sequence[str]:
    """Return the digests of a run's versions before this number."""
    earlier = select(VersionRow.digest).where(VersionRow.run_id == run_id, VersionRow.number < before)
    return session.scalars(earlier).all()


def latest_version(session: Session, run_id: str) -> VersionRef:
    """Return the latest version of a run."""
    number, digest = session.execute(_LATEST, {"run": run_id}).one()
    return VersionRef(number=number, digest=digest)


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


def adopt_version(
    session: Session, now: float, run: RunRow, own: AbstractSet[str], digest: str, manifest: Manifest
) -> None:
    """Record a parent's version as the latest of a region's run. Its latest is replaced, and `own`, the blobs
    that no other version has, are released, if no site has a task on it."""
    latest = session.get_one(VersionRow, (run.id, run.version_number))
    if session.scalars(_ASKED, {"run": run.id, "number": latest.number}).first():
        run.version_number += 1
    else:
        session.delete(latest)
        session.flush()
        unused = sorted({latest.digest, *own} - {digest, *manifest.digests})
        for start in range(0, len(unused), AT_A_TIME):
            some = RunBlobRow.digest.in_(unused[start : start + AT_A_TIME])
            session.execute(delete(RunBlobRow).where(RunBlobRow.run_id == run.id, some))
    ref = VersionRef(number=run.version_number, digest=digest)
    add_version(session, now, run.id, ref, manifest, ())
    run.revision += 1
    run.updated_at = now
    session.flush()
    audit.record(session, now, ACTOR, "version.adopt", digest, run_id=run.id, number=ref.number)


def assigned_updates(session: Session, run_id: str, number: int) -> list[AcceptedUpdate]:
    """Return the updates that were assigned to a version."""
    rows = session.execute(_UPDATES, {"run": run_id, "number": number}).all()
    oldest = min((task.version_number for task, *_ in rows), default=number)
    since = dict(iter(session.execute(_BETWEEN, {"run": run_id, "first": oldest + 1, "last": number - 1})))
    return [
        replace(_accepted(*row), since=[since[later] for later in range(row[0].version_number + 1, number)])
        for row in rows
    ]


def _accepted(task: TaskRow, worker: str, site: str, base: str) -> AcceptedUpdate:
    # An accepted task has a digest and a count: they are written together with that state.
    return AcceptedUpdate(
        site=site,
        worker=worker,
        digest=task.update_digest or "",
        examples=task.examples or 0,
        metrics=task.metrics,
        plan=Plan.model_validate(task.plan),
        base=VersionRef(number=task.version_number, digest=base),
        layers=task.layers,
    )


def latest_updates(session: Session, run_id: str, number: int) -> list[AcceptedUpdate]:
    """Return each site's latest update that was merged before this version, but for sites that have withdrawn."""
    rows = session.execute(_LATEST_UPDATES, {"run": run_id, "number": number}).all()
    return [_accepted(*row) for row in rows]


def withdrawn(session: Session, round_id: str, latest: Sequence[AcceptedUpdate]) -> str:
    """Return the reason why a merge of a round counts no more, as a site has withdrawn whose update it took: one of
    the round, or one of the run's memory; empty if there is none."""
    round_ = session.get_one(RoundRow, round_id)
    if round_.state != "merging":
        return "the round was moved on already"
    is_same = not latest or latest_updates(session, round_.run_id, round_.number) == latest
    return "" if is_same else "a site of the run's memory has withdrawn"


def earlier_choices(session: Session, run_id: str, number: int) -> list[Choices]:
    """Return the layers that each site chose for each of the `RECENT` versions before this one, in order."""
    rows = session.execute(_CHOSEN, {"run": run_id, "first": number - RECENT, "last": number - 1})
    return [choices((site, layers) for _, site, layers in of_one) for _, of_one in groupby(rows, itemgetter(0))]


def bounds_in_force(run: RunRow) -> Bounds:
    """Return the bounds that the run's first round fixed when it opened."""
    return Bounds.model_validate(run.bounds)


def note_outcomes(session: Session, run_id: str, made: NextVersion) -> list[str]:
    """Record the scores of a version's updates, and which were merged in part or left out; return the tasks left
    out."""
    left_out = []
    for task, worker in _outcomes(session, run_id, made.ref.number):
        if worker in made.scores:
            task.metrics = {**task.metrics, **made.scores[worker]}
        unmerged = made.merged.get(worker)
        if unmerged is None:
            left_out.append(task.id)
        elif unmerged:
            task.unmerged = list(unmerged)
    if left_out:
        move_tasks(session, "leave_out", _ANY_OF, {"ids": left_out})
    return sorted(left_out)


def note_scores(session: Session, run_id: str, number: int, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Add the scores of each update that was assigned to a version to its numbers."""
    for task, worker in _outcomes(session, run_id, number):
        task.metrics = {**task.metrics, **scores.get(worker, {})}


def _outcomes(session: Session, run_id: str, number: int) -> Sequence[Row[TaskRow, str]]:
    """Return the tasks assigned to a version, without their plans, and their workers."""
    return session.execute(_OUTCOMES, {"run": run_id, "number": number}).all()
