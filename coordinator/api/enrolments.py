"""Endpoints for workers that request enrolment, and for the administrators who admit them."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from tessera.coordinator.api.dependencies import Admin, Cursor, Gate, Limit, Serving, Shown, SiteCaller, address_of
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.operations import enrolments, sites
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec, Rotation, RotationResult
from tessera.shared.problems import Unauthenticated
from tessera.shared.schema import Page

router = APIRouter(prefix="/v1", tags=["enrolments"], route_class=BoundedRoute)


class Strangers(Gate):
    """Admits all callers; a refused request counts like one without a valid token."""

    async def __call__(self) -> None:
        """Give a handler nothing."""

    def refused(self, request: Request) -> None:
        request.app.state.services.admission.count_failure(address_of(request))


class EnrolmentCallers(Strangers):
    """Admits all callers as often as the rate of enrolments permits."""

    async def admit(self, request: Request) -> None:
        """Raise TooManyRequests."""
        request.app.state.services.admission.count_enrolment(address_of(request))


# A token is optional, which its dependency does not describe.
@router.post("/enrolments", status_code=201, operation_id="createEnrolment", openapi_extra={"security": [{}]})
def create_enrolment(
    spec: EnrolmentSpec,
    request: Request,
    serving: Serving,
    shown: Shown,
    _: Annotated[None, Depends(EnrolmentCallers())],
) -> Enrolment:
    """Request a worker's enrolment: by an administrator, or at once with an enrolment token. Only the hash of its
    secret is sent; repeating the request with the same hash returns the same enrolment."""
    return enrolments.ask(serving, spec, address_of(request), shown.credentials if shown else None)


@router.get("/enrolments/{enrolment_id}", operation_id="getEnrolment")
def get_enrolment(
    enrolment_id: str, serving: Serving, shown: Shown, _: Annotated[None, Depends(Strangers())]
) -> Enrolment:
    """Return the state of an enrolment to the holder of its secret."""
    if shown is None:
        raise Unauthenticated("the request carries no bearer token", headers={"WWW-Authenticate": "Bearer"})
    return enrolments.get_enrolment(serving, enrolment_id, shown.credentials)


@router.get("/enrolments", operation_id="listEnrolments")
def list_enrolments(
    serving: Serving,
    caller: Admin,
    limit: Limit = 100,
    cursor: Cursor = None,
    code: Annotated[
        str | None, Query(max_length=16, description="only enrolments with this code, in any state")
    ] = None,
) -> Page[Enrolment]:
    """Return pending enrolments, oldest first."""
    return enrolments.list_enrolments(serving, limit, cursor, code)


@router.post("/enrolments/{enrolment_id}/approve", operation_id="approveEnrolment")
def approve_enrolment(enrolment_id: str, approval: Approval, serving: Serving, caller: Admin) -> Enrolment:
    """Admit a worker: from now on its secret is a token of its site."""
    return enrolments.approve(serving, caller, enrolment_id, approval)


@router.post("/enrolments/{enrolment_id}/decline", operation_id="declineEnrolment")
def decline_enrolment(enrolment_id: str, serving: Serving, caller: Admin) -> Enrolment:
    """Decline a worker's enrolment."""
    return enrolments.decline(serving, caller, enrolment_id)


@router.post("/tokens/rotate", operation_id="rotateToken")
def rotate_token(rotation: Rotation, serving: Serving, caller: SiteCaller, shown: Shown) -> RotationResult:
    """Replace the secret of a site's token by one made at the site. The previous one stays valid for a while."""
    secret = shown.credentials if shown else ""
    return sites.rotate_token(serving, caller, caller.token_id, rotation.secret_hash, secret)
