"""For machines that watch: is it up, is it ready, which version is it. No token is asked for."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.telemetry.metrics import readiness
from tessera.shared.api.admin import About, Readiness
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import VERSION

router = APIRouter(tags=["health"])


@router.get("/healthz/live", status_code=204, operation_id="getLiveness")
def live() -> None:
    """204 while the process answers at all."""


@router.get("/healthz/ready", operation_id="getReadiness", responses={503: {"model": Readiness}})
def ready(serving: Serving, response: Response) -> Readiness:
    """200 while it can do its work: the schema is the right one, or a later one, and the store takes bytes.

    One whose disk has no room for uploads is ready all the same: there is much else that it can do, and to send its
    callers to another would make no room.
    """
    found = readiness(serving)
    if not found.ready:
        response.status_code = 503
    return found


@router.get("/version", operation_id="getVersion")
def about() -> About:
    return About(version=VERSION, protocol_min=PROTOCOL, protocol_max=PROTOCOL)
