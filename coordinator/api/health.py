"""Health checks and version, without a token."""

import asyncio

from fastapi import APIRouter, Response

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.telemetry.metrics import readiness
from tessera.shared.api.admin import About, Readiness
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import VERSION

router = APIRouter(tags=["health"])


@router.get("/healthz/live", status_code=204, operation_id="getLiveness")
async def live() -> None:
    """Return 204 while the process responds."""


@router.get("/healthz/ready", operation_id="getReadiness", responses={503: {"model": Readiness}})
async def ready(serving: Serving, response: Response) -> Readiness:
    """Return 200 if this version can work on the database's schema and the blob store accepts bytes, else 503.

    A coordinator with a full disk is ready: it can do everything but accept uploads, and routing callers elsewhere
    would not free space. So is one that does not conduct: it accepts updates, and merges them later.
    """
    # Not in the threads of the handlers, all of which may wait.
    report = await asyncio.to_thread(readiness, serving)
    if not report.ready:
        response.status_code = 503
    return report


@router.get("/version", operation_id="getVersion")
async def about() -> About:
    return About(version=VERSION, protocol_min=PROTOCOL, protocol_max=PROTOCOL)
