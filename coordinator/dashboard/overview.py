"""The overview and its alerts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from fastapi import APIRouter, Request, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.approvals import pending_count, withheld
from tessera.coordinator.dashboard.queries import TrafficTotals, forecast, latest_scores, moved_by_run, together
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, Signed
from tessera.coordinator.dashboard.templating import plural, render, size
from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import candidates, invitation, live_workers
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.domain.workers import sites_of
from tessera.coordinator.limits.memory import WATERMARK
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Round, Run
from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.site_spread import scores_by_version

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


@dataclass(frozen=True)
class RunLine:
    run: Run
    moved: TrafficTotals
    scores: Mapping[str, float]


@dataclass(frozen=True)
class OpenRound:
    name: str
    of: int
    round: Round
    end: datetime | None


@router.get("/")
def overview(request: Request, serving: Serving, who: Signed) -> Response:
    """Show the state of the whole federation."""
    database = serving.database
    now = database.now()
    since = now - serving.settings.liveness_seconds
    with database.snapshot() as session:
        counts = views.counts_by_state(session)
        moved = moved_by_run(session)
        rows = _runs(session)
        open_rounds = list(_open_rounds(session, now))
        workers = session.execute(
            select(WorkerRow, SiteRow)
            .join(SiteRow, SiteRow.id == WorkerRow.site_id)
            .where(WorkerRow.last_seen_at >= since, SiteRow.suspended_at.is_(None))
            .order_by(SiteRow.name, WorkerRow.name)
        ).all()
        blobs, blob_bytes = views.blob_totals(session)
        return render(
            request,
            "overview.html",
            who,
            now=views.instant(now),
            counts=counts,
            running=counts.get("running", 0),
            rounds=open_rounds,
            at_work=session.scalar(select(func.count()).where(TaskRow.state == "leased")) or 0,
            live=[views.worker_view(row, site, since) for row, site in workers],
            workers_total=session.scalar(select(func.count()).select_from(WorkerRow)) or 0,
            doing=tasks_in_hand(session, {row.id: f"{site.name}/{row.name}" for row, site in workers}),
            moved=together(moved),
            rows=[_line(session, row, moved) for row in rows],
            concerns=list(_concerns(session, serving, now)),
            free_bytes=serving.disk.free_bytes(),
            memory=serving.memory.share(),
            blobs=blobs,
            blob_bytes=blob_bytes,
        )


def _runs(session: Session) -> list[RunRow]:
    """Return the live runs, newest first, then the last ended ones."""
    newest = select(RunRow).order_by(RunRow.updated_at.desc(), RunRow.id)
    live = RunRow.state.in_(("running", "paused"))
    return [
        *session.scalars(newest.where(live).limit(MAX_LIVE)),
        *session.scalars(newest.where(~live).limit(MAX_ENDED)),
    ]


def _line(session: Session, row: RunRow, moved: Mapping[str, TrafficTotals]) -> RunLine:
    scores = scores_by_version(latest_scores(session, row))
    return RunLine(
        views.run_view(session, row),
        moved.get(row.id, TrafficTotals()),
        next(iter(scores.values())) if scores else {},
    )


def _open_rounds(session: Session, now: float) -> Iterator[OpenRound]:
    rows = session.execute(
        select(RoundRow, RunRow.name, RunRow.spec)
        .join(RunRow, RunRow.id == RoundRow.run_id)
        .where(RoundRow.state.in_(("open", "merging")))
        .order_by(RoundRow.opened_at.desc())
        .limit(MAX_ROUNDS)
    )
    for row, name, spec in rows.all():
        view = views.round_view(session, row)
        yield OpenRound(name, spec["rounds"], view, forecast(session, now, view))


def tasks_in_hand(session: Session, names: Mapping[str, str]) -> dict[str, TaskView]:
    """Return the leased tasks of these workers (id to name), by worker name."""
    rows = session.scalars(select(TaskRow).where(TaskRow.state == "leased"))
    return {
        names[row.worker_id]: views.task_view(row, names[row.worker_id], row.version_number)
        for row in rows
        if row.worker_id in names
    }


def _concerns(session: Session, serving: Services, now: float) -> Iterator[Alert]:
    newest = select(RunRow).order_by(RunRow.updated_at.desc()).limit(MAX_LIVE)
    for run in session.scalars(newest.where(RunRow.state == "paused")):
        why = run.reason or "A person paused it."
        yield Alert(
            f"{run.name} is paused",
            why,
            "Fix what the reason names, then resume the run.",
            f"{PREFIX}/runs/{run.id}",
        )
    live = live_workers(session, now - serving.settings.liveness_seconds)
    for run in session.scalars(newest.where(RunRow.state == "running")):
        view = views.run_view(session, run)
        able, quorum = len(sites_of(candidates(session, invitation(session, run), live))), view.spec.cohort.quorum
        if able < quorum:
            detail = f"{plural(able, 'live site')} could train on {view.spec.dataset}; its quorum is {quorum}."
            yield Alert(
                f"{run.name} waits for workers", detail, "See which sites are silent.", f"{PREFIX}/runs/{run.id}"
            )
        latest = session.get_one(VersionRow, (run.id, run.version_number))
        for warning in latest.warnings:
            yield Alert(f"{run.name} warns", warning, link=f"{PREFIX}/runs/{run.id}")
    if waiting := pending_count(session, now):
        yield Alert(
            f"{plural(waiting, 'worker')} {'waits' if waiting == 1 else 'wait'} for enrolment",
            "Each shows a code on its machine.",
            "An administrator compares the code and admits or declines the worker.",
            f"{PREFIX}/approvals",
        )
    for one in withheld(session, live):
        detail = f"{plural(len(one.workers) + one.more, 'worker')} will not take part before their sites agree."
        yield Alert(
            f"{one.name} waits for sites", detail, "A person at each site approves it there.", f"{PREFIX}/approvals"
        )
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
        yield Alert(
            "Memory is low",
            f"{share:.0%} are in use: no upload starts.",
            "Give the process more memory.",
            weight="bad",
        )


def _of_tasks(session: Session, now: float) -> Iterator[Alert]:
    faulty = TaskRow.state.in_(("failed", "rejected")) & (TaskRow.created_at >= now - LATELY_SECONDS)
    rows = session.execute(select(TaskRow.state, func.count()).where(faulty).group_by(TaskRow.state))
    by_state = {state: count for state, count in rows}  # noqa: C416 (a row is no pair)
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
