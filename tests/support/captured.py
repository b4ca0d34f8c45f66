"""A coordinator that somebody has taken over: the real one, some of whose answers are rewritten on their way out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.coordinator.app import create_app
from tessera.shared.api.framing import unpack_head
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator

CLAIM = ("POST", "/v1/tasks/claim")
HEARTBEAT = ("POST", "/heartbeat")


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    body: bytes

    def is_one(self, of: tuple[str, str]) -> bool:
        return self.method == of[0] and self.path.endswith(of[1])

    @property
    def sends_tensors(self) -> bool:
        """Whether bytes of an update are in it: an upload's, or those that come along with a submission."""
        upload = self.method in {"POST", "PATCH"} and self.path.startswith("/v1/uploads") and bool(self.body)
        return upload or (self.path.endswith("/update") and bool(unpack_head(self.body)[1]))


@dataclass(frozen=True)
class Answered:
    """An answer; its body comes bit by bit if it is an iterator."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] = b""

    @property
    def json(self) -> Any:
        assert isinstance(self.body, bytes)
        return json.loads(self.body)


Lie = Callable[[Asked, Answered], Answered | None]
"""What is said in place of the true answer; None if that may pass."""


class Rewriting:
    """The ASGI application in front of the real one: keeps what was asked, and lies while there are lies."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.asked: list[Asked] = []
        self.lies: list[Lie] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        # Without `Accept` a task comes as JSON alone, which lies can change.
        scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"accept"]}
        asked = Asked(scope["method"], scope["path"], body)
        self.asked.append(asked)
        replayed = _replaying(body, receive)
        if not self.lies:
            await self._app(scope, replayed, send)
            return
        answer = await self._true_answer(scope, replayed)
        for lie in tuple(self.lies):
            answer = lie(asked, answer) or answer
        await _tell(answer, receive, send)

    async def _true_answer(self, scope: Any, receive: Any) -> Answered:
        status, headers, body = 0, {}, bytearray()

        async def keep(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                body.extend(message.get("body", b""))

        await self._app(scope, receive, keep)
        return Answered(status, headers, bytes(body))


async def _whole(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _replaying(body: bytes, receive: Any) -> Any:
    given = False

    async def replayed() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _tell(answer: Answered, receive: Any, send: Any) -> None:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    whole = isinstance(answer.body, bytes)
    if whole and answer.status != 204:
        headers["content-length"] = str(len(answer.body))  # type: ignore[arg-type]
    else:
        headers.pop("content-length", None)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    if not isinstance(answer.body, bytes):
        gone = asyncio.ensure_future(receive())
        async for piece in answer.body:
            if gone.done():
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        gone.cancel()
    await send({"type": "http.response.body", "body": answer.body if whole else b"", "more_body": False})


class HostileCoordinator(LiveCoordinator):
    """Honest until it is told to lie."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self._made: dict[str, bytes] = {}

    def app(self) -> Any:
        self._front = Rewriting(create_app(self.services))
        return self._front

    @property
    def asked(self) -> list[Asked]:
        """Every request since it started."""
        return self._front.asked

    @contextmanager
    def lying(self, *lies: Lie) -> Iterator[None]:
        self._front.lies += [self._serve_what_was_made, *lies]
        try:
            yield
        finally:
            self._front.lies.clear()
            self._made.clear()

    def make(self, data: bytes, digest: str | None = None) -> str:
        """A blob that is in no store: workers get these bytes under their digest, or under another's."""
        digest = digest or digest_of(data)
        self._made[digest] = data
        return digest

    def blob(self, digest: str) -> bytes:
        return self.services.blobs.read(digest)

    def _serve_what_was_made(self, asked: Asked, answer: Answered) -> Answered | None:
        if asked.path.startswith("/v1/blobs/sha256:"):
            made = self._made.get(asked.path.removeprefix("/v1/blobs/"))
            return None if made is None else Answered(body=made)
        if asked.is_one(("POST", "/v1/blobs/read")):
            wanted = json.loads(asked.body)
            if self._made.keys() & set(wanted["digests"]):
                row = (
                    self._made[digest] if digest in self._made else self.blob(digest) for digest in wanted["digests"]
                )
                return Answered(body=b"".join(row)[wanted.get("start", 0) :])
        return None


# ---------------------------------------------------------------- lies


def claiming(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Lie:
    """Changes the task that a claim is answered with, in place or by another."""

    def lie(asked: Asked, answer: Answered) -> Answered | None:
        if not asked.is_one(CLAIM) or answer.status != 200:
            return None
        task = answer.json
        return Answered(200, {"Content-Type": "application/json"}, json.dumps(change(task) or task).encode())

    return lie


def answering(to: tuple[str, str], answer: Answered | Callable[[], Answered]) -> Lie:
    """Says something else to all requests of one kind."""

    def lie(asked: Asked, _: Answered) -> Answered | None:
        if not asked.is_one(to):
            return None
        return answer if isinstance(answer, Answered) else answer()

    return lie


async def endless(piece: bytes, count: int, pause_seconds: float = 0.0) -> AsyncIterator[bytes]:
    """A body that goes on for as long as anybody could be expected to read it."""
    for _ in range(count):
        yield piece
        await asyncio.sleep(pause_seconds)
