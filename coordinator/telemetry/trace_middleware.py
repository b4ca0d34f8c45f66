"""The trace id of each request: in every line that is logged for it, and in the problem that it may come to."""

from __future__ import annotations

from secrets import token_hex

from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, get_contextvars

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
    """Return the header of the caller's that names its trace, empty if there is none."""
    sent: bytes = next((value for name, value in scope["headers"] if name == _NAME), b"")
    return sent.decode("latin-1")


def present_trace() -> str | None:
    """Return the trace of the request in hand."""
    return get_contextvars().get("trace")
