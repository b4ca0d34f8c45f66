"""Reading request bodies: bounded before they are read, and strictly JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from shared.problems import TooLarge


class BoundedRequest(Request):
    """A request whose JSON body has at most `max_body_bytes`, and no NaN, infinity or broken surrogate in it.

    The standard parser lets all of these through, and they fail much later: in the database or in an answer.
    """

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit: int = self.app.state.services.settings.max_body_bytes
            received = bytearray()
            async for piece in self.stream():
                received += piece
                if len(received) > limit:
                    raise TooLarge(f"the body is larger than {limit} bytes (setting max_body_bytes)")
            self._body = bytes(received)
        return self._body

    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False, cache_strings=False)
        except ValueError as fault:
            error = {"type": "json_invalid", "loc": ("body",), "msg": str(fault)[:200], "input": None}
            raise RequestValidationError([error]) from None


class BoundedRoute(APIRoute):
    """A route whose handler is given a BoundedRequest."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            reading = BoundedRequest(request.scope, request.receive)
            # Read here, because FastAPI would turn TooLarge into a bad request.
            await reading.body()
            return await handle(reading)

        return bounded
