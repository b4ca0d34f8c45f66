"""Request bodies with a bounded size and time, and strict JSON."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Scope

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.framing import MEDIA_TYPE, unpack
from tessera.shared.json_limits import check_document
from tessera.shared.problems import BadRequest, TooLarge, TooSlow


class BoundedRequest(Request):
    """A request whose JSON body has at most `max_body_bytes` and no NaN, broken surrogate or duplicate name.

    The standard parser accepts these, and they would fail later: in the database or in a response.
    """

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            settings: CoordinatorSettings = self.app.state.services.settings
            limit = settings.max_body_bytes
            received = bytearray()
            async with in_time(settings.body_timeout_seconds, settings.header_timeout_seconds) as came:
                async for piece in self.stream():
                    came()
                    received += piece
                    if len(received) > limit:
                        raise TooLarge(f"the body is larger than {limit} bytes (setting max_body_bytes)")
            self._body = bytes(received)
        return self._body

    def take_blobs(self) -> None:
        """Take the blobs behind the document out of the body, which was read. Raises BadRequest."""
        try:
            self._body, self.state.blobs = unpack(self._body)
        except ValueError as fault:
            raise BadRequest(f"the body is no document with blobs: {str(fault)[:200]}") from None

    async def json(self) -> Any:
        try:
            value = pydantic_core.from_json(await self.body(), allow_inf_nan=False, cache_strings=False)
            check_document(await self.body())
            return value
        except ValueError as fault:
            error = {"type": "json_invalid", "loc": ("body",), "msg": str(fault)[:200], "input": None}
            raise RequestValidationError([error]) from None


@asynccontextmanager
async def in_time(most_seconds: float, idle_timeout_seconds: float) -> AsyncIterator[Callable[[], None]]:
    """Yield a function to call for each received piece. Raises TooSlow if one is late, or the whole body."""
    now = asyncio.get_running_loop().time
    end = now() + most_seconds
    try:
        async with asyncio.timeout(min(idle_timeout_seconds, most_seconds)) as silence:
            yield lambda: silence.reschedule(min(now() + idle_timeout_seconds, end))
    except TimeoutError:
        if not silence.expired():
            raise
        raise TooSlow(
            f"no byte of the body was received for {idle_timeout_seconds:g} s, or not all within {most_seconds:g} s "
            "(settings header_timeout_seconds, body_timeout_seconds)",
            # The rest of the body would be read as the next request.
            headers={"Connection": "close"},
        ) from None


def _of_json(scope: Scope) -> Scope:
    """Return the scope of a request whose blobs are taken out of its body."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


class BoundedRoute(APIRoute):
    """A route whose handler gets a BoundedRequest; blobs behind its document are in `request.state.blobs`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            framed = request.headers.get("Content-Type") == MEDIA_TYPE
            reading = BoundedRequest(_of_json(request.scope) if framed else request.scope, request.receive)
            # Read here, because FastAPI would turn TooLarge into a bad request.
            await reading.body()
            if framed:
                reading.take_blobs()
            return await handle(reading)

        return bounded
