"""For workers that ask to be admitted, and for the administrators who admit them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials
from sqlalchemy import select

from tessera.coordinator.api.dependencies import Admin, Cursor, Limit, Serving, SiteCaller, address_of, bearer
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.auth import enrolment, tokens
from tessera.coordinator.db import views
from tessera.coordinator.db.tables import EnrolmentRow
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec, Rotated, Rotation
from tessera.shared.problems import Forbidden, NotFound, Unauthenticated
from tessera.shared.schema import Page
from tessera.shared.token_format import normal_code

router = APIRouter(prefix="/v1", tags=["enrolments"], route_class=BoundedRoute)

Shown = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


# Without a token too, which a dependency on one does not say.
@router.post("/enrolments", status_code=201, operation_id="createEnrolment", openapi_extra={"security": [{}]})
def create_enrolment(spec: EnrolmentSpec, request: Request, serving: Serving, shown: Shown) -> Enrolment:
    """Asks for a worker to be admitted: by an administrator, or at once for one that shows an enrolment token. Only
    the hash of its secret is sent. The same hash again is the same wish."""
    address = address_of(request)
    serving.admission.enrols(address)
    try:
        with serving.database.transaction() as session:
            now = serving.database.now()
            row = enrolment.asked_before(session, now, spec)
            if row is None and shown is not None:
                caller = tokens.authenticate(session, now, shown.credentials)
                if caller.role != "enrolment":
                    raise Forbidden(f"this needs an enrolment token, or none; yours has role {caller.role}")
                row = enrolment.redeem(session, now, spec, caller, address)
            if row is None:
                row = enrolment.ask(session, now, spec, address, serving.settings.pending_enrolments)
            return views.enrolment_view(row, now)
    except Unauthenticated:
        serving.admission.failed(address)
        raise


@router.get("/enrolments/{enrolment_id}", operation_id="getEnrolment")
def get_enrolment(enrolment_id: str, request: Request, serving: Serving, shown: Shown) -> Enrolment:
    """What became of a wish to be admitted, told to whoever shows the secret that it was made for."""
    if shown is None:
        serving.admission.failed(address_of(request))
        raise Unauthenticated("the request carries no bearer token", headers={"WWW-Authenticate": "Bearer"})
    try:
        with serving.database.snapshot() as session:
            row = enrolment.shown_to(session, enrolment_id, shown.credentials)
            view = views.enrolment_view(row, serving.database.now())
    except NotFound:
        serving.admission.failed(address_of(request))
        raise
    serving.admission.asked(row.id)
    return view


@router.get("/enrolments", operation_id="listEnrolments")
def list_enrolments(
    serving: Serving,
    caller: Admin,
    limit: Limit = 100,
    cursor: Cursor = None,
    code: Annotated[
        str | None, Query(max_length=16, description="only who showed this code, also if decided about")
    ] = None,
) -> Page[Enrolment]:
    """Workers that wait to be admitted, oldest first."""
    now = serving.database.now()
    waiting = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    with serving.database.snapshot() as session:

        def view(row: Any) -> Enrolment:
            return views.enrolment_view(row[0], now, enrolment.decided_at(session, row[0]))

        query = select(EnrolmentRow).where(waiting if code is None else EnrolmentRow.code == normal_code(code))
        return views.page(session, query, (EnrolmentRow.created_at, EnrolmentRow.id), view, limit, cursor)


@router.post("/enrolments/{enrolment_id}/approve", operation_id="approveEnrolment")
def approve_enrolment(enrolment_id: str, approval: Approval, serving: Serving, caller: Admin) -> Enrolment:
    """Admits a worker: from now on its secret is a token of its site."""
    with serving.database.transaction() as session:
        now = serving.database.now()
        row = enrolment.approve(session, now, caller.actor, enrolment_id, approval)
        return views.enrolment_view(row, now)


@router.post("/enrolments/{enrolment_id}/decline", operation_id="declineEnrolment")
def decline_enrolment(enrolment_id: str, serving: Serving, caller: Admin) -> Enrolment:
    """Tells a worker that it is not admitted."""
    with serving.database.transaction() as session:
        now = serving.database.now()
        row = enrolment.decline(session, now, caller.actor, enrolment_id)
        return views.enrolment_view(row, now)


@router.post("/tokens/rotate", operation_id="rotateToken")
def rotate_token(rotation: Rotation, serving: Serving, caller: SiteCaller, shown: Shown) -> Rotated:
    """Gives a site's token another secret, made at the site; the one before is admitted for a while yet."""
    grace = serving.settings.rotation_grace_seconds
    with serving.database.transaction() as session:
        secret = shown.credentials if shown else ""
        tokens.rotate_token(session, serving.database.now(), caller, secret, rotation.secret_hash, grace)
    return Rotated(grace_seconds=grace)
