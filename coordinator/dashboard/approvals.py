"""Enrolments and runs that wait for a person's approval."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy import select

from tessera.coordinator.alerts.attention import held_updates, withheld_runs
from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import AdminSender, Fields, PageRoute, Signed
from tessera.coordinator.dashboard.templating import render
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.studies import is_present
from tessera.coordinator.db.tables import SiteRow
from tessera.coordinator.operations import enrolments
from tessera.shared.api.admin import Approval
from tessera.shared.problems import Fault, Invalid, validated

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

MAX_PENDING = 100


@router.get("/approvals")
def list_approvals(request: Request, serving: Serving, who: Signed) -> Response:
    since = serving.database.now() - serving.settings.liveness_seconds
    with serving.reading(who.principal) as session:
        runs, held = withheld_runs(session, live_workers(session, since)), held_updates(session)
        known = set(session.scalars(select(SiteRow.name).where(is_present(session))))
    # As in the API, only administrators see enrolments.
    pending = enrolments.list_enrolments(serving, MAX_PENDING).items if who.administers else ()
    return render(request, "approvals.html", who, withheld=runs, held=held, pending=pending, known=known)


@router.post("/approvals/{enrolment_id}")
def decide(enrolment_id: str, serving: Serving, who: AdminSender, fields: Fields) -> Response:
    """Admit a worker by the code that its site's people read on their machine, or decline it."""
    if fields.get("decision") == "approve":
        given: dict[str, object] = {name: fields.get(name, "").strip() for name in ("code", "site")}
        given["create_site"] = fields.get("create_site") == "yes"
        approval = validated(Approval, given, "the form is invalid; see the errors")
        enrolments.approve(serving, who.principal, enrolment_id, approval)
    elif fields.get("decision") == "decline":
        enrolments.decline(serving, who.principal, enrolment_id)
    else:
        fault = Fault(pointer="/decision", detail="must be approve or decline")
        raise Invalid("the form has no decision", errors=[fault])
    return RedirectResponse(f"{PREFIX}/approvals", status_code=303)
