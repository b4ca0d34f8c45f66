"""The coordinator's status on one page: progress, warnings, failures, room, and what waits for a person."""

from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.alerts.attention import Alert
from tessera.coordinator.alerts.failures import FailedTasks, alike, failed_tasks
from tessera.coordinator.db import views
from tessera.coordinator.db.studies import is_present, reads_all
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, VersionRow, WorkerRow, one_of
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.limits.memory import Memory
from tessera.shared.api.admin import Concern, FailureGroup, LiveRun, OpenRound, Status
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import VERSION

MAX_RUNS = 20
MAX_CONCERNS = 20
MAX_FAILURES = 10
MAX_NAMED = 8
"""Workers that one group of failures names."""
LATEST_TASKS = 50
"""Failed tasks that are grouped."""


def status(session: Session, live_since: float, alerts: Iterable[Alert], disk: DiskSpace, memory: Memory) -> Status:
    """Return the coordinator's status, with the free disk and the memory of this process.

    A worker that called at `live_since` or later is live.
    """
    # Each run lists its own warnings. A full disk comes before many runs that wait.
    concerns = sorted((one for one in alerts if one.code != "run-warning"), key=lambda one: one.weight != "bad")
    is_live = (WorkerRow.last_seen_at >= live_since) & SiteRow.suspended_at.is_(None)
    counts = (
        select(func.count(), func.count().filter(is_live))
        .join_from(WorkerRow, SiteRow)
        .where(~WorkerRow.revoked, is_present(session))
    )
    workers, live = session.execute(counts).one()
    failed, _ = failed_tasks(session, LATEST_TASKS)
    whole = reads_all(session)
    blobs, blob_bytes = views.blob_totals(session) if whole else (None, None)
    return Status(
        version=VERSION,
        protocol=PROTOCOL,
        runs=views.runs_by_state(session),
        live_runs=tuple(_live_runs(session)),
        workers=workers,
        live_workers=live,
        needs_attention=tuple(
            Concern(code=one.code, title=one.title, detail=one.detail, remedy=one.remedy, weight=one.weight)
            for one in concerns[:MAX_CONCERNS]
        ),
        needs_attention_total=len(concerns),
        failures=tuple(map(_failure, alike(failed)[:MAX_FAILURES])),
        blobs=blobs,
        blob_bytes=blob_bytes,
        free_disk_bytes=disk.free_bytes() if whole else None,
        memory_share=memory.share() if whole else None,
    )


def _live_runs(session: Session) -> list[LiveRun]:
    of_version = (VersionRow.run_id == RunRow.id) & (VersionRow.number == RunRow.version_number)
    rows = session.execute(
        select(RunRow.id, RunRow.name, RunRow.state, RunRow.reason, RunRow.spec, RunRow.version_number,
               VersionRow.warnings)
        .join(VersionRow, of_version)
        .where(RunRow.state.in_(LIVE_RUN))
        .order_by(RunRow.updated_at.desc(), RunRow.id.desc())
        .limit(MAX_RUNS)
    ).all()  # fmt: skip
    rounds = _open_rounds(session, [row.id for row in rows])
    return [
        LiveRun(
            run=row.id,
            name=row.name,
            state=row.state,
            reason=row.reason,
            method=row.spec["method"]["name"],
            version=row.version_number,
            rounds=row.spec["rounds"],
            round=rounds.get(row.id),
            warnings=tuple(row.warnings),
        )
        for row in rows
    ]


def _open_rounds(session: Session, runs: list[str]) -> dict[str, OpenRound]:
    """Return the open round of each of these runs that has one."""
    is_live = one_of(RoundRow.state, *LIVE_ROUND) & RoundRow.run_id.in_(runs)
    rounds = session.scalars(select(RoundRow).where(is_live)).all()
    tasks: dict[str | None, dict[str, int]] = defaultdict(dict)
    counts = (
        select(TaskRow.round_id, TaskRow.state, func.count())
        .where(TaskRow.round_id.in_([row.id for row in rounds]))
        .group_by(TaskRow.round_id, TaskRow.state)
    )
    for round_id, state, count in session.execute(counts):
        tasks[round_id][state] = count
    of_run = {row.run_id: row.id for row in rounds}
    # Of runs that buffer updates: what earlier rounds asked for, and goes on.
    others = views.GOES_ON & TaskRow.run_id.in_(of_run) & TaskRow.round_id.not_in(of_run.values())
    goes_on = select(TaskRow.run_id, TaskRow.state, func.count()).where(others)
    for run_id, state, count in session.execute(goes_on.group_by(TaskRow.run_id, TaskRow.state)):
        tasks[of_run[run_id]][state] = tasks[of_run[run_id]].get(state, 0) + count
    return {row.run_id: views.view_of(OpenRound, row, tasks=tasks[row.id]) for row in rounds}


def _failure(group: FailedTasks) -> FailureGroup:
    newest = group.tasks[0]
    return FailureGroup(
        run=newest.run,
        name=group.run,
        state=newest.state,
        code=group.code,
        tasks=len(group.tasks),
        workers=tuple(group.workers[:MAX_NAMED]),
        latest_at=newest.created_at,
        detail=newest.problem.detail if newest.problem else "",
        remedy=newest.problem.remedy if newest.problem else "",
    )
