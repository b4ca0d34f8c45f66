"""What waits for somebody's yes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.api.access import Serving
from coordinator.page.guarding import PREFIX
from coordinator.page.rendering import render
from coordinator.page.visitors import PageRoute, Signed
from coordinator.storage import views
from coordinator.storage.snapshots import Member, live_workers
from coordinator.storage.tables import RunRow

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MOST_WORKERS = 8


@dataclass(frozen=True)
class Withheld:
    """A run that some sites have not agreed to."""

    run: str
    name: str
    state: str
    workers: Sequence[tuple[str, str]]
    """Who, and what their site says."""
    more: int


@router.get("/approvals")
def list_approvals(request: Request, serving: Serving, who: Signed) -> Response:
    now = serving.database.now()
    with serving.database.snapshot() as session:
        found = withheld(session, live_workers(session, now - serving.settings.live_seconds))
    return render(request, "approvals.html", who, now=views.instant(now), withheld=found)


def withheld(session: Session, live: Sequence[Member]) -> list[Withheld]:
    """Live runs that live workers withhold themselves from until a person at their site has agreed."""
    by_run: dict[str, list[tuple[str, str]]] = {}
    for worker in live:
        for run_id, said in worker.declared.get("withheld", {}).items():
            by_run.setdefault(run_id, []).append((worker.name, str(said)))
    rows = session.scalars(
        select(RunRow)
        .where(RunRow.id.in_(by_run), RunRow.state.in_(("running", "paused")))
        .order_by(RunRow.created_at)
    )
    return [
        Withheld(
            row.id, row.name, row.state, by_run[row.id][:MOST_WORKERS], max(0, len(by_run[row.id]) - MOST_WORKERS)
        )
        for row in rows
    ]
