"""The overview."""

from dataclasses import dataclass
from datetime import datetime

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from markupsafe import Markup
from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from tessera.coordinator.alerts.attention import Alert
from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.queries import TrafficTotals, forecast, moved_by_run, score_curves
from tessera.coordinator.dashboard.runs import RunLine
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, SignedOrSite
from tessera.coordinator.dashboard.templating import metric_name, number, render
from tessera.coordinator.db import views
from tessera.coordinator.db.studies import is_present
from tessera.coordinator.db.tables import IS_LEASED, RUNS, RoundRow, RunRow, SiteRow, TaskRow, WorkerRow, one_of
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.shared.metrics.svg_charts import spark

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MAX_LIVE = 20
MAX_ENDED = 5
MAX_ROUNDS = 12


@dataclass(frozen=True)
class SiteLine:
    """A site in a word."""

    name: str
    suspended: bool
    live: int
    """Its workers that called lately."""
    at_work: int
    """Tasks that its workers are at."""
    seen_at: datetime | None

    @property
    def state(self) -> str:
        if self.suspended:
            return "suspended"
        return "working" if self.live and self.at_work else "waiting" if self.live else "away"


@router.get("/")
def overview(request: Request, serving: Serving, who: SignedOrSite) -> Response:
    """Show the state of the whole federation; redirect a site to its own page."""
    if who.is_site:
        return RedirectResponse(f"{PREFIX}/site", status_code=303)
    now = serving.database.now()
    with serving.reading(who.principal) as session:
        counts = views.runs_by_state(session)
        moved = moved_by_run(session)
        sites = _sites(session, now - serving.settings.liveness_seconds)
        lines = RunLine.of_all(session, _runs(session), moved)
        by_code: dict[str, list[Alert]] = {}
        for concern in serving.alerts(session, now):
            by_code.setdefault(concern.code, []).append(concern)
        return render(
            request,
            "overview.html",
            who,
            counts=counts,
            running=counts.get("running", 0),
            rounds=_open_rounds(session, now),
            at_work=sum(site.at_work for site in sites),
            sites=sorted(sites, key=lambda site: (site.state != "away", site.name)),
            live=sum(site.live for site in sites),
            workers_total=session.scalar(
                select(func.count()).select_from(WorkerRow).join(SiteRow).where(is_present(session))
            )
            or 0,
            moved=sum(moved.values(), TrafficTotals()),
            rows=lines,
            curves=_curves(session, lines),
            concerns=by_code,
        )


def _curves(session: Session, lines: list[RunLine]) -> dict[str, Markup]:
    """Draw the score of each run by version."""
    names = {line.run.id: next(iter(line.scores), "") for line in lines}
    found = score_curves(session, [(line.run, names[line.run.id]) for line in lines])
    return {
        run_id: spark(values, f"{metric_name(names[run_id])} from {number(values[0], 3)} to {number(values[-1], 3)}")
        for run_id, values in found.items()
    }


def _sites(session: Session, since: float) -> list[SiteLine]:
    at_work = dict(
        session.execute(
            select(WorkerRow.site_id, func.count())
            .join_from(TaskRow, WorkerRow)
            .where(IS_LEASED)
            .group_by(WorkerRow.site_id)
        ).all()
    )
    live = func.sum(case((WorkerRow.last_seen_at >= since, 1), else_=0))
    rows = session.execute(
        select(SiteRow.id, SiteRow.name, SiteRow.suspended_at, live, func.max(WorkerRow.last_seen_at))
        .outerjoin(WorkerRow, (WorkerRow.site_id == SiteRow.id) & ~WorkerRow.revoked)
        .where(is_present(session))
        .group_by(SiteRow.id, SiteRow.name, SiteRow.suspended_at)
    )
    return [
        SiteLine(
            name, suspended is not None, 0 if suspended else count, at_work.get(id_, 0), seen and views.instant(seen)
        )
        for id_, name, suspended, count, seen in rows
    ]


def _runs(session: Session) -> list[RunRow]:
    """Return the live runs, newest first, then the last ended ones."""
    newest = RUNS.order_by(RunRow.updated_at.desc(), RunRow.id.desc())
    live = RunRow.state.in_(LIVE_RUN)
    rows = [
        *session.execute(newest.where(live).limit(MAX_LIVE)),
        *session.execute(newest.where(~live).limit(MAX_ENDED)),
    ]
    return [row for row, _ in rows]


def _open_rounds(session: Session, now: float) -> list[dict[str, object]]:
    rows = session.execute(
        select(RoundRow, RunRow.name, RunRow.spec)
        .options(views.WITH_TASKS)
        .join_from(RoundRow, RunRow)
        .where(one_of(RoundRow.state, *LIVE_ROUND))
        .order_by(RoundRow.opened_at.desc())
        .limit(MAX_ROUNDS)
    )
    rounds = [(name, spec["rounds"], views.round_view(row)) for row, name, spec in rows.all()]
    return [{"name": name, "of": of, "round": view, "end": forecast(session, now, view)} for name, of, view in rounds]
