"""Routes that know who calls, and that the caller may, before they read any of the body; and bounded bodies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, cast

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from tessera.coordinator.api.dependencies import Gate, address_of
from tessera.coordinator.services import Services
from tessera.shared.api.framing import MEDIA_TYPE, unpack, unpack_head
from tessera.shared.json_limits import MAX_ERRORS, check_document, count_values
from tessera.shared.problems import BadRequest, Fault, Invalid, Problem, TooLarge, TooSlow, faults_of

BODY_SECONDS = 60.0
"""Maximum time for a JSON body."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

INLINE_BYTES = 16 << 10
"""Bodies up to this size are parsed in the event loop, larger ones in a thread, in their caller's share."""


@dataclass(frozen=True)
class FollowingBlob:
    """A blob behind a document that is too large to be in memory: its length, and its bytes as far as they were read
    with the document. The others are the rest of the request's stream."""

    length: int
    begun: bytes


class BoundedRequest(Request):
    """A request whose body has as many bytes, and whose JSON as many values, as its gate permits."""

    def __init__(self, scope: Scope, receive: Receive, gate: Gate) -> None:
        super().__init__(scope, receive)
        self._serving: Services = self.app.state.services
        self._gate = gate
        self.count: Callable[[int], None] = lambda _: None
        """Counts received bytes against the memory for bodies."""
        self.document: BaseModel | None = None

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._require_size(int(self.headers.get("Content-Length", 0)))
            self._body = await self._read()
        return self._body

    async def take_blobs(self) -> None:
        """Take the blobs behind the document out of the body. One that is larger than `submission_bytes` is left in
        the stream, as a FollowingBlob. Raises BadRequest."""
        try:
            head = await self._read(lines=2)
            _, sizes, begun = unpack_head(head)
            if len(sizes) == 1 and sizes[0] > self._serving.settings.submission_bytes:
                self._body, self.state.following = head[: head.index(b"\n")], FollowingBlob(sizes[0], begun)
            else:
                self._body, self.state.blobs = unpack(head + await self._read(len(head)))
        except ValueError as fault:
            raise BadRequest(f"the body is no document with blobs: {str(fault)[:200]}") from None

    async def _read(self, before: int = 0, lines: int | None = None) -> bytes:
        """Return the rest of the body, of which `before` bytes were read, or as much of it as has that many lines."""
        settings, received = self._serving.settings, bytearray()
        async with in_time(BODY_SECONDS, settings.header_timeout_seconds) as came:
            async for piece in self.pieces:
                came()
                self._require_size(before + len(received) + len(piece))
                self.count(len(piece))
                received += piece
                if lines is not None and (lines := lines - piece.count(b"\n")) <= 0:
                    break
        return bytes(received)

    def _require_size(self, size: int) -> None:
        limit, default = self._gate.most_bytes, self._serving.settings.max_body_bytes
        most = default if limit is None else min(limit, default)
        if size > most:
            setting = " (setting max_body_bytes)" if most == default else ""
            raise TooLarge(f"the body is larger than {most} bytes{setting}", remedy=self._gate.remedy)

    @cached_property
    def pieces(self) -> AsyncGenerator[bytes, None]:
        """The stream, which is read in parts: each begins where the part before ended."""
        return self.stream()

    async def json(self) -> Any:
        """Return the content of the JSON body, which `read_json` has validated."""
        return self.document

    async def read_json(self, kind: type[BaseModel]) -> None:
        """Parse and validate the JSON body. Raises TooLarge, BadRequest and Invalid."""
        if (count := count_values(await self.body())) > (most := self._gate.most_values):
            raise TooLarge(f"the body has {count} values; at most {most} are read here", remedy="Send fewer.")
        self.document = await self.parsed(partial(_read, kind, self._gate.check))

    async def parsed(self, parse: Callable[[bytes], T]) -> T:
        """Parse the body and return the result: in a thread, in the caller's share, if the body is large."""
        body = await self.body()
        if len(body) <= INLINE_BYTES:
            return parse(body)
        caller = self.state.caller
        return await self._serving.inspections.run(caller.owner if caller else address_of(self), parse, body)


def _read(kind: type[M], check: Callable[[Any], None], body: bytes) -> M:
    try:
        document = check_document(body)
    except ValueError as fault:
        errors = [Fault(pointer="", detail=str(fault)[:200])]
        raise BadRequest("the request is invalid; see the errors", errors=errors) from None
    check(document)
    try:
        return kind.model_validate(document)
    except ValidationError as refusal:
        if (count := refusal.error_count()) > MAX_ERRORS:
            # To list them takes longer than all else.
            raise Invalid(f"the request is invalid: its body has {count} errors", remedy=BadRequest.remedy) from None
        errors = faults_of(refusal, model=kind)
        raise Invalid("the request is invalid; see the errors", errors=errors) from None


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
            f"no byte of the body was received for {idle_timeout_seconds:g} s (setting header_timeout_seconds), "
            f"or not all within {most_seconds:g} s",
            # The rest of the body would be read as the next request.
            headers={"Connection": "close"},
        ) from None


def _of_json(scope: Scope) -> Scope:
    """Return the scope of a request whose blobs are taken out of its body."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


class BoundedRoute(APIRoute):
    """A route that asks its gate first, and only then reads a body, if it takes one. Its handler gets a
    BoundedRequest; blobs behind its document are in `request.state.blobs`, or in `request.state.following`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle, gate = super().get_route_handler(), gate_of(self.dependant)

        async def gated(request: Request) -> Response:
            serving: Services = request.app.state.services
            framed = self.body_field is not None and request.headers.get("Content-Type") == MEDIA_TYPE
            reading = BoundedRequest(_of_json(request.scope) if framed else request.scope, request.receive, gate)
            address = address_of(request)
            try:
                caller = reading.state.caller = await gate.admit(reading)
                owner = caller.owner if caller else None
                with serving.bodies.receive(owner, address) as reading.count:
                    # Read here, because FastAPI would turn each refusal into a bad request without its reason.
                    if framed:
                        await reading.take_blobs()
                    kind = reading.headers.get("Content-Type", "").lower()
                    if self.body_field and await reading.body() and "json" in kind:
                        await reading.read_json(cast("type[BaseModel]", self.body_field.field_info.annotation))
                    return await handle(reading)
            except (Problem, RequestValidationError) as refusal:
                # A refusal that may pass is no fault of the caller.
                if not (isinstance(refusal, Problem) and refusal.retryable):
                    gate.refused(request)
                raise

        return gated


def gate_of(dependant: Dependant) -> Gate:
    """Return the gate among a route's dependencies, or one that admits all callers."""
    calls: list[object] = [each.call for each in dependant.dependencies]
    return next((call for call in calls if isinstance(call, Gate)), Gate())
