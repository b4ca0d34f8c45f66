"""Health checks and version, without a token."""

from fastapi import APIRouter, Response

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.telemetry.metrics import readiness
from tessera.shared.api.admin import About, Readiness
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import VERSION

router = APIRouter(tags=["health"])


@router.get("/healthz/live", status_code=204, operation_id="getLiveness")
def live() -> None:
    """Return 204 while the process responds."""


@router.get("/healthz/ready", operation_id="getReadiness", responses={503: {"model": Readiness}})
def ready(serving: Serving, response: Response) -> Readiness:
    """Return 200 if the database's schema is at head or later and the blob store accepts bytes, else 503.

    A coordinator with a full disk is ready: it can do everything but accept uploads, and routing callers elsewhere
    would not free space.
    """
    report = readiness(serving)
    if not report.ready:
        response.status_code = 503
    return report


@router.get("/version", operation_id="getVersion")
def about() -> About:
    return About(version=VERSION, protocol_min=PROTOCOL, protocol_max=PROTOCOL)
