"""Enrolments and runs that wait for a person's approval."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import Fields, PageRoute, Sender, Signed, require_role
from tessera.coordinator.dashboard.templating import render
from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.tables import EnrolmentRow, RunRow
from tessera.coordinator.domain.workers import LiveWorker
from tessera.coordinator.operations import enrolments
from tessera.shared.api.admin import Approval
from tessera.shared.problems import Fault, Invalid, faults_of

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MAX_WORKERS = 8
MAX_PENDING = 100


@dataclass(frozen=True)
class WithheldRun:
    """A run that some sites have not approved."""

    run: str
    name: str
    state: str
    workers: Sequence[tuple[str, str]]
    """Each worker's name and its site's reason."""
    more: int


@router.get("/approvals")
def list_approvals(request: Request, serving: Serving, who: Signed) -> Response:
    now = serving.database.now()
    with serving.database.snapshot() as session:
        runs = withheld(session, live_workers(session, now - serving.settings.liveness_seconds))
    # As in the API, only administrators see enrolments.
    pending = enrolments.list_enrolments(serving, MAX_PENDING).items if who.administers else ()
    return render(request, "approvals.html", who, now=views.instant(now), withheld=runs, pending=pending)


@router.post("/approvals/{enrolment_id}")
def decide(enrolment_id: str, serving: Serving, who: Sender, fields: Fields) -> Response:
    """Admit a worker by the code that its site's people read on their machine, or decline it."""
    require_role(who, "admin")
    if fields.get("decision") == "approve":
        given = {name: fields.get(name, "").strip() for name in ("code", "site")}
        try:
            approval = Approval.model_validate({**given, "create_site": fields.get("create_site") == "yes"})
        except ValidationError as refusal:
            raise Invalid("the form is invalid; see the errors", errors=faults_of(refusal)) from None
        enrolments.approve(serving, who.principal, enrolment_id, approval)
    elif fields.get("decision") == "decline":
        enrolments.decline(serving, who.principal, enrolment_id)
    else:
        fault = Fault(pointer="/decision", detail="must be approve or decline")
        raise Invalid("the form has no decision", errors=[fault])
    return RedirectResponse(f"{PREFIX}/approvals", status_code=303)


def pending_count(session: Session, now: float) -> int:
    waits = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    return session.scalar(select(func.count()).where(waits)) or 0


def withheld(session: Session, live: Sequence[LiveWorker]) -> list[WithheldRun]:
    """Return the live runs that live workers do not join before a person at their site approves."""
    by_run: dict[str, list[tuple[str, str]]] = {}
    for worker in live:
        for run_id, reason in worker.declared.get("withheld", {}).items():
            by_run.setdefault(run_id, []).append((worker.name, str(reason)))
    rows = session.scalars(
        select(RunRow)
        .where(RunRow.id.in_(by_run), RunRow.state.in_(("running", "paused")))
        .order_by(RunRow.created_at)
    )
    return [
        WithheldRun(
            row.id, row.name, row.state, by_run[row.id][:MAX_WORKERS], max(0, len(by_run[row.id]) - MAX_WORKERS)
        )
        for row in rows
    ]
