"""Server-sent events for viewers."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from tessera.coordinator.api.dependencies import Serving, Shown, Viewer, holder
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.db import views
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.notify.event_stream import Permission
from tessera.coordinator.services import Services
from tessera.shared.problems import Forbidden, NotFound, Unauthenticated

router = APIRouter(prefix="/v1", tags=["events"], route_class=BoundedRoute)

MEDIA_TYPE = "text/event-stream"

LastEvent = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, lt=1 << 53, description="the last event received; without it, from now on"),
]


class EventStream(StreamingResponse):
    media_type = MEDIA_TYPE


@router.get("/events", operation_id="listenToAll", response_class=EventStream)
async def all_events(serving: Serving, caller: Viewer, shown: Shown, last_event_id: LastEvent = None) -> EventStream:
    """Stream every change of state as a `ChangeEvent` in an event of type `change`. Events of type `progress`
    have no id and report heartbeats of workers."""
    return await stream(serving, None, last_event_id, caller, partial(holder, serving, shown))


@router.get("/runs/{run_id}/events", operation_id="listenToRun", response_class=EventStream)
async def run_events(
    run_id: str, serving: Serving, caller: Viewer, shown: Shown, last_event_id: LastEvent = None
) -> EventStream:
    """Stream the events of one run."""
    return await stream(serving, run_id, last_event_id, caller, partial(holder, serving, shown))


async def stream(
    serving: Services,
    run_id: str | None,
    since: int | None,
    caller: Principal,
    authenticate: Callable[[], Principal],
) -> EventStream:
    """Return a stream of the events of the caller's runs, or of one run; it ends when `authenticate` refuses the
    caller, or the run is not the caller's any more. Raises NotFound and Busy."""

    def present(who: Principal) -> Permission:
        with serving.reading(who) as session:
            if run_id is not None:
                views.find_run(session, run_id)
            return Permission(session.studies)

    def permission() -> Permission | None:
        with suppress(Unauthenticated, Forbidden, NotFound):
            return present(authenticate())
        return None

    if run_id is not None:
        await run_in_threadpool(present, caller)
    serving.change_feed.require_capacity(caller.token_id)
    events = serving.change_feed.listen(run_id, since, caller.token_id, permission)
    # nginx would hold events back until they fill a buffer.
    return EventStream(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
