"""The composition root of the HTTP side."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from tessera.coordinator.api import (
    admin,
    blobs,
    dossier,
    enrolments,
    errors,
    events,
    health,
    runs,
    sites,
    studies,
    tasks,
)
from tessera.coordinator.api.events import MEDIA_TYPE as EVENT_STREAM
from tessera.coordinator.conductor.child_process import GOODBYE_SECONDS
from tessera.coordinator.dashboard import routes as page
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import Metrics
from tessera.coordinator.telemetry.request_timing import Timing, Tracing
from tessera.shared.problems import MEDIA_TYPE, ProblemDocument
from tessera.shared.version import VERSION

# Otherwise FastAPI describes its own body for 422, which is never sent.
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemDocument, "description": "a problem (application/problem+json)"}
    for status in (422, "default")
}

DESCRIPTION = "Federated learning of transformers: runs, rounds, tasks and the blobs that travel between them."


def create_app(services: Services, *, conduct: bool = True) -> FastAPI:
    """Return the API over these services; with `conduct`, a thread conducts, otherwise another process does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.waiters.attach()
        services.change_feed.attach()
        # A daemon, joined for a limited time: the next process repeats any interrupted work.
        thread = threading.Thread(target=services.conductor.conduct, name="conductor", daemon=True)
        for notifier in services.notifiers:
            notifier.start()
        if conduct:
            thread.start()
            if services.shipper:
                services.shipper.start()
        else:
            services.poller.start()
            services.retention.start(sweep_only=True)
        yield
        services.release_waiters()
        services.conductor.wakeups.end()
        if services.shipper:
            services.shipper.end()
        for notifier in services.notifiers:
            notifier.end()
        if conduct:
            thread.join(GOODBYE_SECONDS)
        else:
            services.poller.stop()
            services.retention.end()
        services.inspections.close()
        services.uploads.threads.close()
        services.differences.threads.close()
        services.database.close()

    # Without FastAPI's pages, which load scripts from another host; and the description requires a token.
    app = _Api(title="Tessera", version=VERSION, description=DESCRIPTION, lifespan=lifespan, openapi_url=None)
    app.state.services = services
    app.state.metrics = Metrics(services)
    errors.install(app)
    # The last one added is the outermost.
    app.add_middleware(Timing)
    app.add_middleware(Tracing)
    routers = (
        module.router for module in (runs, dossier, events, tasks, blobs, sites, studies, enrolments, admin, health)
    )
    for router in routers:
        app.include_router(router, responses=REFUSALS)
    page.install(app)
    # FastAPI builds its routes on first use: build them now, so that the first request is not slow.
    nothing = {"type": "http", "method": "GET", "path": "/", "root_path": "", "query_string": b"", "headers": []}
    for route in app.router.routes:
        route.matches(dict(nothing))
    return app


class _Api(FastAPI):
    """A FastAPI application whose description has correct media types, parameters and names."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            description = super().openapi()
            for operations in description["paths"].values():
                for operation in operations.values():
                    for answer in operation["responses"].values():
                        _name_media_types(answer.get("content", {}))
                    for parameter in operation.get("parameters", ()):
                        _take_null_out(parameter["schema"])
            _refuse_other_names(description["components"])
        return super().openapi()


def _name_media_types(content: dict[str, Any]) -> None:
    """Correct the media types: FastAPI gives every response of an operation that of its first."""
    for media_type, described in tuple(content.items()):
        if described.get("schema", {}).get("$ref") == "#/components/schemas/ProblemDocument":
            del content[media_type]
            content[MEDIA_TYPE] = described
        elif media_type == EVENT_STREAM:
            # OpenAPI 3.1 has no schema for a stream of events.
            content[EVENT_STREAM] = {}


def _take_null_out(schema: dict[str, Any]) -> None:
    """Remove null from an optional parameter: headers and queries have no null."""
    if {"type": "null"} in schema.get("anyOf", ()):
        [schema_of_value] = [each for each in schema.pop("anyOf") if each != {"type": "null"}]
        schema |= schema_of_value


def _refuse_other_names(schema: object) -> None:
    """Describe that names outside their pattern are refused, which pydantic leaves out."""
    if isinstance(schema, dict):
        if "patternProperties" in schema:
            schema.setdefault("additionalProperties", False)
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            _refuse_other_names(each)
