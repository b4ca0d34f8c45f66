"""The overview and its alerts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.approvals import withheld_runs
from tessera.coordinator.dashboard.queries import TrafficTotals, forecast, latest_scores, moved_by_run
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, Signed
from tessera.coordinator.dashboard.templating import plural, render, size
from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import candidates, invitation, live_workers
from tessera.coordinator.db.tables import EnrolmentRow, RoundRow, RunRow, SiteRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.coordinator.domain.workers import sites_of
from tessera.coordinator.limits.memory import WATERMARK
from tessera.coordinator.services import Services
from tessera.shared.api.tasks import TaskView

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MAX_LIVE = 20
MAX_ENDED = 5
MAX_ROUNDS = 12
LATELY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Alert:
    """A condition that needs a person."""

    title: str
    detail: str
    remedy: str = ""
    link: str = ""
    weight: str = "warn"


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
            concerns=list(_concerns(session, serving, now)),
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
        .join_from(RoundRow, RunRow)
        .where(RoundRow.state.in_(LIVE_ROUND))
        .order_by(RoundRow.opened_at.desc())
        .limit(MAX_ROUNDS)
    )
    rounds = [(name, spec["rounds"], views.round_view(session, row)) for row, name, spec in rows.all()]
    return [{"name": name, "of": of, "round": view, "end": forecast(session, now, view)} for name, of, view in rounds]


def tasks_in_hand(session: Session, names: Mapping[str, str]) -> dict[str, TaskView]:
    """Return the leased tasks of these workers (id to name), by worker name."""
    rows = session.scalars(select(TaskRow).where(TaskRow.state == "leased"))
    named = [(names[row.worker_id], row) for row in rows if row.worker_id in names]
    return {name: views.task_view(row, name, row.version_number) for name, row in named}


def _concerns(session: Session, serving: Services, now: float) -> Iterator[Alert]:
    newest = select(RunRow).order_by(RunRow.updated_at.desc()).limit(MAX_LIVE)
    for run in session.scalars(newest.where(RunRow.state == "paused")):
        why, remedy = run.reason or "A person paused it.", "Fix what the reason names, then resume the run."
        yield Alert(f"{run.name} is paused", why, remedy, f"{PREFIX}/runs/{run.id}")
    live = live_workers(session, now - serving.settings.liveness_seconds)
    for run in session.scalars(newest.where(RunRow.state == "running")):
        invited, link = invitation(session, run), f"{PREFIX}/runs/{run.id}"
        able, quorum = len(sites_of(candidates(session, invited, live))), invited.spec.cohort.quorum
        if able < quorum:
            detail = f"{plural(able, 'live site')} could train on {invited.spec.dataset}; its quorum is {quorum}."
            yield Alert(f"{run.name} waits for workers", detail, "See which sites are silent.", link)
        latest = session.get_one(VersionRow, (run.id, run.version_number))
        for warning in latest.warnings:
            yield Alert(f"{run.name} warns", warning, link=link)
    pending = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    if waiting := session.scalar(select(func.count()).where(pending)):
        yield Alert(
            f"{plural(waiting, 'worker')} {'waits' if waiting == 1 else 'wait'} for enrolment",
            "Each shows a code on its machine.",
            "An administrator compares the code and admits or declines the worker.",
            f"{PREFIX}/approvals",
        )
    for run, workers in withheld_runs(session, live):
        detail = f"{plural(len(workers), 'worker')} will not take part before their sites agree."
        remedy = "A person at each site approves it there."
        yield Alert(f"{run.name} waits for sites", detail, remedy, f"{PREFIX}/approvals")
    yield from _of_tasks(session, now)
    if not serving.disk.has():
        yield Alert(
            "The disk is nearly full",
            f"{size(serving.disk.free_bytes())} are free, less than the reserve: uploads and merges are refused.",
            "Free disk space, or keep fewer versions (setting keep_versions).",
            f"{PREFIX}/storage",
            "bad",
        )
    if (share := serving.memory.share()) > WATERMARK:
        detail = f"{share:.0%} are in use: no upload starts."
        yield Alert("Memory is low", detail, "Give the process more memory.", weight="bad")


def _of_tasks(session: Session, now: float) -> Iterator[Alert]:
    faulty = TaskRow.state.in_(("failed", "rejected")) & (TaskRow.created_at >= now - LATELY_SECONDS)
    counts = select(TaskRow.state, func.count()).where(faulty).group_by(TaskRow.state)
    by_state = dict(session.execute(counts).all())
    if failed := by_state.get("failed"):
        yield Alert(
            f"{plural(failed, 'task')} failed within a day",
            "The workers could not do them.",
            "Each failure names its cause and remedy.",
            f"{PREFIX}/failures",
        )
    if rejected := by_state.get("rejected"):
        yield Alert(
            f"{plural(rejected, 'update')} rejected within a day",
            "They did not match the plan or could not be read.",
            "Each rejection names the block and the fault.",
            f"{PREFIX}/failures",
            "bad",
        )
