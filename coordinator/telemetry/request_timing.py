"""Durations of requests by route, as a histogram and as spans."""

from contextlib import nullcontext
from functools import cache
from secrets import token_hex
from time import perf_counter

from opentelemetry.trace import SpanKind, get_current_span
from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, get_contextvars

from tessera.coordinator.telemetry.metrics import REQUEST_SECONDS
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import HEADER, trace_in

_NAME = HEADER.encode()


class Tracing:
    """Gives a request the id that its caller sent, or else one of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # Not unbound at the end: the request has a context of its own, and what went wrong is told after this.
            bind_contextvars(trace=trace_in(sent_in(scope)) or token_hex(16))
        await self._app(scope, receive, send)


def sent_in(scope: Scope) -> str:
    """Return the caller's trace header, or an empty string."""
    sent: bytes = next((value for name, value in scope["headers"] if name == _NAME), b"")
    return sent.decode("latin-1")


def present_trace() -> str | None:
    """Return the current request's trace id."""
    return get_contextvars().get("trace")


NOTHING = "none"
"""Label of requests for unknown routes: callers choose their paths and methods, so these cannot be labels."""


class Timing:
    """Counts each request under the template of its route, once its answer has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A request that fails without an answer is answered further out, with this.
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = perf_counter()
        try:
            # Who sends no trace would only begin one of a single span: scrapes, probes, polls that end in nothing.
            parent = sent_in(scope) if spans.on() else ""
            with spans.span(scope["method"], kind=SpanKind.SERVER, parent=parent) if parent else nullcontext():
                try:
                    await self._app(scope, receive, noting)
                finally:
                    if parent:
                        _tell(scope, status)
        finally:
            _series(*asked_of(scope), status // 100).observe(perf_counter() - began)


def _tell(scope: Scope, status: int) -> None:
    method, route = asked_of(scope)
    span = get_current_span()
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})


def asked_of(scope: Scope) -> tuple[str, str]:
    """Return the method and the path template of a routed request, such as `/v1/runs/{run_id}`."""
    route, method = scope.get("route"), scope["method"]
    return (method, route.path) if route is not None and method in (route.methods or ()) else (NOTHING, NOTHING)


# The library finds a series under a lock and by texts that it checks. There are some tens of them.
@cache
def _series(method: str, route: str, hundreds: int) -> Histogram:
    return REQUEST_SECONDS.labels(method=method, route=route, status=f"{hundreds}xx")
