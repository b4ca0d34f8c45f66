"""Failures, the audit chain, storage."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import func, select, true
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving, require_role
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, Signed
from tessera.coordinator.dashboard.templating import render, span
from tessera.coordinator.db import views
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    AuditRow,
    BlobRow,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    TaskRow,
    UploadRow,
    VersionRow,
    WorkerRow,
)
from tessera.coordinator.limits.memory import WATERMARK
from tessera.coordinator.settings import CoordinatorSettings

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

SITES = 50
ENTRIES = 100
FAILURES = 50
ABANDONED = 10
RUNS = 100
CHOICES = 200

Text = Annotated[str | None, Query(max_length=64)]
Instant = Annotated[float | None, Query(ge=0, le=1e12)]
Place = Annotated[int | None, Query(ge=1, lt=1 << 53)]


# ---------------------------------------------------------------- failures


@router.get("/failures")
def list_failures(
    request: Request, serving: Serving, who: Signed, run: Text = None, before: Instant = None
) -> Response:
    """Show failed tasks and rejected updates, newest first."""
    faulty = TaskRow.state.in_(("failed", "rejected"))
    with serving.database.snapshot() as session:
        of_run = views.run_view(session, views.find_run(session, run)) if run else None
        query = (
            select(TaskRow, RunRow.name, WORKER_NAME)
            .join_from(TaskRow, RunRow)
            .join_from(TaskRow, WorkerRow)
            .join(SiteRow)
            .where(faulty)
            .order_by(TaskRow.created_at.desc(), TaskRow.id)
            .limit(FAILURES + 1)
        )
        if run:
            query = query.where(TaskRow.run_id == run)
        if before is not None:
            query = query.where(TaskRow.created_at < before)
        rows = session.execute(query).all()
        failures = [
            (views.task_view(task, worker, task.version_number + (task.kind == "train")), name)
            for task, name, worker in rows[:FAILURES]
        ]
        paused = select(RunRow).where(RunRow.state == "paused", RunRow.reason.is_not(None)).limit(FAILURES)
        rounds = (
            select(RoundRow, RunRow.name)
            .join_from(RoundRow, RunRow)
            .where(RoundRow.state == "abandoned", RoundRow.run_id == run if run else true())
            .order_by(RoundRow.opened_at.desc())
            .limit(ABANDONED)
        )
        abandoned = () if before else session.execute(rounds)
        of_which = f"run={run}&" if run else ""
        older = rows[FAILURES - 1][0].created_at if len(rows) > FAILURES else None
        return render(
            request,
            "failures.html",
            who,
            run=of_run,
            failures=failures,
            abandoned=[(views.round_view(session, row), name) for row, name in abandoned],
            paused=[] if run else [views.run_view(session, row) for row in session.scalars(paused)],
            newer=f"{PREFIX}/failures?{of_which}" if before else None,
            older=f"{PREFIX}/failures?{of_which}before={older!r}" if older else None,
        )


# ---------------------------------------------------------------- audit


@router.get("/audit")
def list_audit(request: Request, serving: Serving, who: Signed, run: Text = None, before: Place = None) -> Response:
    """Show every change of state, newest first; for administrators, as in the API."""
    require_role(who.principal, "admin")
    with serving.database.snapshot() as session:
        query = select(AuditRow).order_by(AuditRow.seq.desc()).limit(ENTRIES + 1)
        if run:
            query = query.where(AuditRow.run_id == run)
        if before is not None:
            query = query.where(AuditRow.seq < before)
        rows = session.scalars(query).all()
        of_run = f"run={run}&" if run else ""
        newest = select(RunRow.id, RunRow.name).order_by(RunRow.created_at.desc()).limit(CHOICES)
        return render(
            request,
            "audit.html",
            who,
            entries=[views.audit_view(row) for row in rows[:ENTRIES]],
            runs=session.execute(newest).all(),
            run=run or "",
            newer=f"{PREFIX}/audit?{of_run}" if before else None,
            older=f"{PREFIX}/audit?{of_run}before={rows[ENTRIES - 1].seq}" if len(rows) > ENTRIES else None,
        )


# ---------------------------------------------------------------- storage


@router.get("/storage")
def show_storage(request: Request, serving: Serving, who: Signed) -> Response:
    with serving.database.snapshot() as session:
        blobs, blob_bytes = views.blob_totals(session)
        unfinished = session.execute(
            select(func.count(), func.coalesce(func.sum(UploadRow.length), 0)).where(~UploadRow.complete)
        ).one()
        return render(
            request,
            "storage.html",
            who,
            blobs=blobs,
            blob_bytes=blob_bytes,
            free_bytes=serving.disk.free_bytes(),
            reserve=serving.settings.disk_reserve_bytes,
            has_room=serving.disk.has(),
            memory=serving.memory.share(),
            watermark=WATERMARK,
            uploads=unfinished[0],
            upload_bytes=unfinished[1],
            rows=_stores(session),
            keeping=_keeping(serving.settings),
        )


def _stores(session: Session) -> list[tuple[RunRow, int, int, int]]:
    """Return the latest runs, each with the numbers of its stored versions and blobs, and the blobs' bytes."""
    runs = session.scalars(select(RunRow).order_by(RunRow.created_at.desc()).limit(RUNS)).all()
    ids = [run.id for run in runs]
    sizes = session.execute(
        select(RunBlobRow.run_id, func.count(), func.sum(BlobRow.size))
        .join_from(RunBlobRow, BlobRow)
        .where(RunBlobRow.run_id.in_(ids))
        .group_by(RunBlobRow.run_id)
    )
    by_run = {run_id: (count, int(size)) for run_id, count, size in sizes}
    kept = VersionRow.run_id.in_(ids) & VersionRow.retired_at.is_(None)
    counts = select(VersionRow.run_id, func.count()).where(kept).group_by(VersionRow.run_id)
    versions = dict(session.execute(counts).all())
    return [(run, versions.get(run.id, 0), *by_run.get(run.id, (0, 0))) for run in runs]


def _keeping(settings: CoordinatorSettings) -> list[tuple[str, str]]:
    versions = settings.keep_versions
    return [
        ("Versions of a run", "all" if versions is None else f"the first and the latest {versions}"),
        ("Updates", f"{span(settings.keep_updates_seconds)} after the end of their round"),
        ("Unreferenced blobs", span(settings.keep_unused_seconds)),
        ("Garbage collection", f"every {span(settings.gc_interval_seconds)}"),
    ]
