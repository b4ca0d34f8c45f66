"""The overview."""

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.queries import TrafficTotals, forecast, latest_scores, moved_by_run
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, Signed
from tessera.coordinator.dashboard.templating import render
from tessera.coordinator.db import views
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, WorkerRow
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.shared.api.tasks import TaskView

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MAX_LIVE = 20
MAX_ENDED = 5
MAX_ROUNDS = 12


@router.get("/")
def overview(request: Request, serving: Serving, who: Signed) -> Response:
    """Show the state of the whole federation."""
    now = serving.database.now()
    since = now - serving.settings.liveness_seconds
    with serving.database.snapshot() as session:
        counts = views.counts_by_state(session, RunRow)
        moved = moved_by_run(session)
        workers = session.execute(
            select(WorkerRow, SiteRow)
            .join_from(WorkerRow, SiteRow)
            .where(WorkerRow.last_seen_at >= since, SiteRow.suspended_at.is_(None), ~WorkerRow.revoked)
            .order_by(SiteRow.name, WorkerRow.name)
        ).all()
        blobs, blob_bytes = views.blob_totals(session)
        return render(
            request,
            "overview.html",
            who,
            counts=counts,
            running=counts.get("running", 0),
            rounds=_open_rounds(session, now),
            at_work=session.scalar(select(func.count()).where(TaskRow.state == "leased")) or 0,
            live=[views.worker_view(row, site, since) for row, site in workers],
            workers_total=session.scalar(select(func.count()).select_from(WorkerRow)) or 0,
            doing=tasks_in_hand(session, {row.id: f"{site.name}/{row.name}" for row, site in workers}),
            moved=sum(moved.values(), TrafficTotals()),
            rows=[_run_line(session, row, moved) for row in _runs(session)],
            concerns=list(serving.alerts(session, now)),
            free_bytes=serving.disk.free_bytes(),
            memory=serving.memory.share(),
            blobs=blobs,
            blob_bytes=blob_bytes,
        )


def _runs(session: Session) -> list[RunRow]:
    """Return the live runs, newest first, then the last ended ones."""
    newest = select(RunRow).order_by(RunRow.updated_at.desc(), RunRow.id)
    live = RunRow.state.in_(LIVE_RUN)
    return [
        *session.scalars(newest.where(live).limit(MAX_LIVE)),
        *session.scalars(newest.where(~live).limit(MAX_ENDED)),
    ]


def _run_line(session: Session, row: RunRow, moved: Mapping[str, TrafficTotals]) -> dict[str, object]:
    run = views.run_view(session, row)
    return {"run": run, "moved": moved.get(row.id, TrafficTotals()), "scores": latest_scores(session, run)}


def _open_rounds(session: Session, now: float) -> list[dict[str, object]]:
    rows = session.execute(
        select(RoundRow, RunRow.name, RunRow.spec)
        .options(views.WITH_TASKS)
        .join_from(RoundRow, RunRow)
        .where(RoundRow.state.in_(LIVE_ROUND))
        .order_by(RoundRow.opened_at.desc())
        .limit(MAX_ROUNDS)
    )
    rounds = [(name, spec["rounds"], views.round_view(row)) for row, name, spec in rows.all()]
    return [{"name": name, "of": of, "round": view, "end": forecast(session, now, view)} for name, of, view in rounds]


def tasks_in_hand(session: Session, names: Mapping[str, str]) -> dict[str, TaskView]:
    """Return the leased tasks of these workers (id to name), by worker name."""
    rows = session.scalars(select(TaskRow).where(TaskRow.state == "leased"))
    named = [(names[row.worker_id], row) for row in rows if row.worker_id in names]
    return {name: views.task_view(row, name, row.version_number) for name, row in named}
