"""For machines that watch: is it up, is it ready, which version is it. No token is asked for."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.exc import SQLAlchemyError

from coordinator.api.access import Serving
from coordinator.version import VERSION
from shared.wire import PROTOCOL, About, Readiness

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
    try:
        schema = serving.database.at_head_or_later()
    except SQLAlchemyError:
        schema = False
    writable = serving.blobs.writable()
    has_room = serving.room.has()
    if not (schema and writable):
        response.status_code = 503
    return Readiness(
        ready=schema and writable, schema_at_head=schema, store_writable=writable, store_has_room=has_room
    )


@router.get("/version", operation_id="getVersion")
def about() -> About:
    return About(version=VERSION, protocol_min=PROTOCOL, protocol_max=PROTOCOL)
