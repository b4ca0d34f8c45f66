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
from tessera.coordinator.services import Services
from tessera.shared.problems import Forbidden, Unauthenticated

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
    return await stream(serving, None, last_event_id, caller.token_id, partial(holder, serving, shown))


@router.get("/runs/{run_id}/events", operation_id="listenToRun", response_class=EventStream)
async def run_events(
    run_id: str, serving: Serving, caller: Viewer, shown: Shown, last_event_id: LastEvent = None
) -> EventStream:
    """Stream the events of one run."""
    return await stream(serving, run_id, last_event_id, caller.token_id, partial(holder, serving, shown))


async def stream(
    serving: Services, run_id: str | None, since: int | None, token_id: str, authenticate: Callable[[], object]
) -> EventStream:
    """Return a stream of all events or a run's; it ends when `authenticate` refuses the caller. Raises NotFound and
    Busy."""
    if run_id is not None:
        await run_in_threadpool(_require_run, serving, run_id)

    def is_admitted() -> bool:
        with suppress(Unauthenticated, Forbidden):
            authenticate()
            return True
        return False

    serving.change_feed.require_capacity(token_id)
    events = serving.change_feed.listen(run_id, since, token_id, is_admitted)
    return EventStream(events, headers={"Cache-Control": "no-store"})


def _require_run(serving: Services, run_id: str) -> None:
    with serving.database.snapshot() as session:
        views.find_run(session, run_id)
