"""Request bodies with a bounded size and time, and strict JSON."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Scope

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.framing import MEDIA_TYPE, unpack, unpack_head
from tessera.shared.json_limits import check_document
from tessera.shared.problems import BadRequest, TooLarge, TooSlow


@dataclass(frozen=True)
class FollowingBlob:
    """A blob behind a document that is too large to be in memory: its length, and its bytes as far as they were read
    with the document. The others are the rest of the request's stream."""

    length: int
    begun: bytes


class BoundedRequest(Request):
    """A request whose JSON body has at most `max_body_bytes` and no NaN, broken surrogate or duplicate name.

    The standard parser accepts these, and they would fail later: in the database or in a response.
    """

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def take_blobs(self) -> None:
        """Take the blobs behind the document out of the body. One that is larger than `submission_bytes` is left in
        the stream, as a FollowingBlob. Raises BadRequest."""
        try:
            head = await self._read(lines=2)
            _, sizes, begun = unpack_head(head)
            if len(sizes) == 1 and sizes[0] > self._settings.submission_bytes:
                self._body, self.state.following = head[: head.index(b"\n")], FollowingBlob(sizes[0], begun)
            else:
                self._body, self.state.blobs = unpack(head + await self._read(len(head)))
        except ValueError as fault:
            raise BadRequest(f"the body is no document with blobs: {str(fault)[:200]}") from None

    async def _read(self, before: int = 0, lines: int | None = None) -> bytes:
        """Return the rest of the body, of which `before` bytes were read, or as much of it as has that many lines."""
        limit, received = self._settings.max_body_bytes, bytearray()
        async with in_time(self._settings.body_timeout_seconds, self._settings.header_timeout_seconds) as came:
            async for piece in self.pieces:
                came()
                received += piece
                if before + len(received) > limit:
                    raise TooLarge(f"the body is larger than {limit} bytes (setting max_body_bytes)")
                if lines is not None and (lines := lines - piece.count(b"\n")) <= 0:
                    break
        return bytes(received)

    @cached_property
    def pieces(self) -> AsyncGenerator[bytes, None]:
        """The stream, which is read in parts: each begins where the one before ended."""
        return self.stream()

    @property
    def _settings(self) -> CoordinatorSettings:
        settings: CoordinatorSettings = self.app.state.services.settings
        return settings

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
    """A route whose handler gets a BoundedRequest; blobs behind its document are in `request.state.blobs`, or in
    `request.state.following`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            framed = request.headers.get("Content-Type") == MEDIA_TYPE
            reading = BoundedRequest(_of_json(request.scope) if framed else request.scope, request.receive)
            # Read here, because FastAPI would turn TooLarge into a bad request.
            await (reading.take_blobs() if framed else reading.body())
            return await handle(reading)

        return bounded
