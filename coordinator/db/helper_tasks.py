"""Tasks of helpers in rounds with secure sums. They belong to no round, but to the version before it: a helper may
train in the same round."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Row, select
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import WORKER_NAME, RunRow, SiteRow, TaskRow, WorkerRow
from tessera.coordinator.domain.snapshot import SumsSnapshot, TaskSnapshot
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.secure_sums import HELPER_KINDS, SumTask
from tessera.shared.secure_sums.messages import Agreement, Envelope, seeds_of, signatures_of

_OF_ROUND = (
    (TaskRow.run_id == given("run"))
    & TaskRow.kind.in_(HELPER_KINDS)
    & (TaskRow.version_number == given("version"))
    # What failed before a person resumed the run does not count against it.
    & ((TaskRow.state != "failed") | (TaskRow.created_at >= given("since")))
    & (TaskRow.state != "cancelled")
)
_HELPER_TASKS = (
    select(TaskRow, SiteRow.name)
    .join_from(TaskRow, WorkerRow)
    .join(SiteRow)
    .where(_OF_ROUND)
    .order_by(TaskRow.created_at, TaskRow.id)
)
_ENVELOPES = (
    select(WORKER_NAME, TaskRow.statement)
    .join_from(TaskRow, WorkerRow)
    .join(SiteRow)
    .where(TaskRow.run_id == given("run"), TaskRow.merged_in == given("number"))
)


def helper_tasks(session: Session, run: RunRow) -> Sequence[Row[TaskRow, str]]:
    """Return the helpers' tasks of the run's present round that count, each with its site."""
    about = {"run": run.id, "version": run.version_number, "since": run.resumed_at}
    return session.execute(_HELPER_TASKS, about).all()


def sums_snapshot(session: Session, run: RunRow, spec: RunSpec, here: Collection[str] | None) -> SumsSnapshot:
    """Return how far the helpers are with the run's present round."""
    assert spec.secure_sums is not None  # noqa: S101 (for the types)
    helpers = len(spec.secure_sums.helpers)
    found: dict[str, list[TaskSnapshot]] = {kind: [] for kind in HELPER_KINDS}
    seeds: set[int] = set()
    for task, site in helper_tasks(session, run):
        present = here is None or task.worker_id in here
        about = (task.id, site, task.state, task.token, task.attempts, task.lease_expires_at, present)
        found[task.kind].append(TaskSnapshot(*about))
        if task.kind == "open" and task.state == "accepted":
            seeds.update(SumTask.model_validate(task.sums).seeds)
    is_open = len(seeds) == len(seeds_of(helpers))
    return SumsSnapshot(helpers, signatures_of(helpers), tuple(found["agree"]), tuple(found["open"]), is_open=is_open)


def envelopes(session: Session, run_id: str, number: int) -> dict[str, Envelope]:
    """Return the envelopes of the updates that were assigned to a version, by worker."""
    rows = session.execute(_ENVELOPES, {"run": run_id, "number": number})
    return {worker: Envelope.model_validate(statement) for worker, statement in rows}


def agreements(tasks: Sequence[Row[TaskRow, str]]) -> tuple[Agreement, ...]:
    """Return the signatures that helpers gave."""
    return tuple(
        Agreement.model_validate(task.statement)
        for task, _ in tasks
        if task.kind == "agree" and task.state == "accepted"
    )
