"""For workers that ask to be admitted, and for the administrators who admit them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials

from tessera.coordinator.api.dependencies import Admin, Cursor, Limit, Serving, SiteCaller, address_of, bearer
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.operations import enrolments
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec, Rotated, Rotation
from tessera.shared.problems import Unauthenticated
from tessera.shared.schema import Page

router = APIRouter(prefix="/v1", tags=["enrolments"], route_class=BoundedRoute)

Shown = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


# Without a token too, which a dependency on one does not say.
@router.post("/enrolments", status_code=201, operation_id="createEnrolment", openapi_extra={"security": [{}]})
def create_enrolment(spec: EnrolmentSpec, request: Request, serving: Serving, shown: Shown) -> Enrolment:
    """Ask for a worker to be admitted: by an administrator, or at once for one that shows an enrolment token. Only
    the hash of its secret is sent. The same hash again is the same wish."""
    return enrolments.ask(serving, spec, address_of(request), shown.credentials if shown else None)


@router.get("/enrolments/{enrolment_id}", operation_id="getEnrolment")
def get_enrolment(enrolment_id: str, request: Request, serving: Serving, shown: Shown) -> Enrolment:
    """Return what became of a wish to be admitted, told to whoever shows the secret that it was made for."""
    if shown is None:
        serving.admission.count_failure(address_of(request))
        raise Unauthenticated("the request carries no bearer token", headers={"WWW-Authenticate": "Bearer"})
    return enrolments.get_enrolment(serving, enrolment_id, address_of(request), shown.credentials)


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
    """Return workers that wait to be admitted, oldest first."""
    return enrolments.list_enrolments(serving, limit, cursor, code)


@router.post("/enrolments/{enrolment_id}/approve", operation_id="approveEnrolment")
def approve_enrolment(enrolment_id: str, approval: Approval, serving: Serving, caller: Admin) -> Enrolment:
    """Admit a worker: from now on its secret is a token of its site."""
    return enrolments.approve(serving, caller, enrolment_id, approval)


@router.post("/enrolments/{enrolment_id}/decline", operation_id="declineEnrolment")
def decline_enrolment(enrolment_id: str, serving: Serving, caller: Admin) -> Enrolment:
    """Tell a worker that it is not admitted."""
    return enrolments.decline(serving, caller, enrolment_id)


@router.post("/tokens/rotate", operation_id="rotateToken")
def rotate_token(rotation: Rotation, serving: Serving, caller: SiteCaller, shown: Shown) -> Rotated:
    """Give a site's token another secret, made at the site; the one before is admitted for a while yet."""
    return enrolments.rotate(serving, caller, shown.credentials if shown else "", rotation)
