"""How connections are held: what each may cost, whatever its peer does or leaves undone.

The server below bounds neither the bytes of a request's head nor the time that a peer may take to send one or to take
an answer, and counts no connections. Here each has a bound; those on time follow progress, so that who is slow but
moves is never cut off.
"""

from __future__ import annotations

import asyncio
import fcntl
import http
import json
import resource
import socket
import ssl
import struct
import termios
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tessera.coordinator.api.errors import headers_of
from tessera.coordinator.settings import CoordinatorSettings
from tessera.coordinator.telemetry.metrics import CONNECTIONS, PROBLEMS_TOTAL
from tessera.shared.problems import MEDIA_TYPE, BadRequest, Busy, HeadersTooLarge, Problem, TooSlow, Unavailable
from tessera.shared.urls import is_loopback

log = structlog.get_logger()

GRACE_SECONDS = 5
"""How long requests in hand may go on when the process is told to stop."""

RETRY_SECONDS = 5.0
"""When one that was turned away may ask again."""

TURNED_AWAY = 256
"""Connections beyond the limit that are told so; those beyond these are closed without a word."""

OTHER_FILES = 1_024
"""Descriptors for all but connections: databases, blobs, staging files."""

MAX_PIPELINED = 32
"""Requests that may be sent before the first of them is answered: the server below holds any number of them."""

LOOKS = 4
"""How often within `idle_timeout_seconds` it is looked whether a receiver has taken anything."""


def configuration(app: ASGIApp, settings: CoordinatorSettings) -> uvicorn.Config:
    """Return the server as `serve` runs it."""
    door = ConnectionLimiter(settings)
    return uvicorn.Config(
        ShutdownMiddleware(app),
        host=settings.host,
        port=settings.port,
        http=partial(LimitedHTTPProtocol, door),  # type: ignore[arg-type]  # it is called, whatever it is
        # There is no route for it, and its protocol would know no limits.
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
    )


class InsecureBindError(RuntimeError):
    """To listen as the settings say would show tokens and updates to whoever is on the way."""


class PortInUseError(RuntimeError):
    """Something listens at the address of the settings already, or nobody may."""


class BadCertificate(RuntimeError):
    """The files of the settings make no TLS server."""


def require_private(settings: CoordinatorSettings) -> None:
    """Raise Exposed if other machines would be served in plain HTTP, and BadCertificate."""
    if settings.tls_cert is None:
        if not (settings.behind_proxy or is_loopback(settings.host)):
            raise InsecureBindError(
                f"TESSERA_HOST={settings.host} serves other machines, and without TLS whoever is on the way reads "
                "tokens and updates. Give TESSERA_TLS_CERT and TESSERA_TLS_KEY, or set TESSERA_BEHIND_PROXY=true if "
                "a proxy does TLS and nobody else reaches this address."
            )
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.tls_client_ca)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as fault:
        named = ", ".join(str(file) for file in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if file)
        # What OpenSSL says of a file without the key names neither.
        hint = "" if settings.tls_key else ". Its key has to be in the same file, or TESSERA_TLS_KEY name another"
        raise BadCertificate(f"TLS cannot be served with {named}: {fault}{hint}") from fault


def require_free(settings: CoordinatorSettings) -> None:
    """Raise Taken if the server could not listen where the settings say: before anything is made or shown once."""
    try:
        (family, kind, *_, address), *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as fault:
        raise PortInUseError(
            f"{settings.host}:{settings.port} cannot be listened at: {fault.strerror or fault}. Give another "
            "TESSERA_PORT or TESSERA_HOST, or end what listens there."
        ) from fault


def raise_file_limit(connections: int) -> None:
    """Let this process open as many files as it takes connections, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning("coordinator.few_files", allowed=allowed, wanted=wanted)


class ConnectionLimiter:
    """Who is connected: how many in all, and how many from each address."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self._inside: Counter[str] = Counter()
        self.total = 0

    def enter(self, address: str) -> Problem | None:
        """Return one more from this address; the reason to turn it away, if there is one. To be followed by
        `leave`."""
        self._inside[address] += 1
        self.total += 1
        CONNECTIONS.inc()
        most, each = self.settings.max_connections, self.settings.most_per_address
        if self.total > most:
            return Busy(f"{most} connections are open (setting max_connections)", retry_after_seconds=RETRY_SECONDS)
        if each is not None and self._inside[address] > each:
            return Busy(
                f"{each} connections from your address are open (setting max_connections_per_address)",
                retry_after_seconds=RETRY_SECONDS,
            )
        return None

    def leave(self, address: str) -> None:
        CONNECTIONS.dec()
        self.total -= 1
        self._inside[address] -= 1
        if not self._inside[address]:
            del self._inside[address]


class LimitedHTTPProtocol(HttpToolsProtocol):
    """One connection with its limits: on the bytes and the time of a request's head, and on how long a receiver may
    take nothing of an answer."""

    def __init__(self, door: ConnectionLimiter, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._door = door
        self._settings = door.settings
        self._turned_away: Problem | None = None
        self._refused = False
        # The head of the request in hand: bytes that the parser told of, and those it was fed since.
        self._in_head = False
        self._told_bytes = 0
        self._untold_bytes = 0
        self._told = False
        self._body_ended = True
        self._deadline: asyncio.TimerHandle | None = None
        # The answers: what had not been taken when it was last looked, and since when that is so.
        self._look: asyncio.TimerHandle | None = None
        self._untaken_bytes = 0
        self._untaken_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._turned_away = self._door.enter(self._address)
        if self._turned_away and self._door.total > self._settings.max_connections + TURNED_AWAY:
            transport.abort()
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self._address)
        self._expect_nothing()
        if self._look:
            self._look.cancel()
        super().connection_lost(exc)

    # ------------------------------------------------------------ what comes

    def data_received(self, data: bytes) -> None:
        if self._refused:
            # Read and dropped: were it left unread, the refusal might never arrive.
            return
        self._told = False
        super().data_received(data)
        self._untold_bytes = 0 if self._told else self._untold_bytes + len(data)
        if not self._told and self._answered:
            # Line breaks between two requests would keep a connection open for ever.
            self._expect()
        if self._head_bytes > self._settings.max_header_bytes and not self._refused:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise BadRequest("too many requests were sent ahead of their answers")
        super().on_message_begin()
        self._told = True
        self._told_bytes = self._untold_bytes = 0
        self._in_head, self._body_ended = True, False
        self._expect()

    def on_url(self, url: bytes) -> None:
        self._tell(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._tell(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._told = True
        self._in_head = False
        self._expect_nothing()
        too_large = self._head_bytes > self._settings.max_header_bytes
        refusal = self._too_large() if too_large else self._turned_away or self._hostless()
        if refusal:
            self._refused = True
            self.app = _Refusing(refusal)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._told = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._told = self._body_ended = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg))

    @property
    def _head_bytes(self) -> int:
        return self._told_bytes + self._untold_bytes

    @property
    def _answered(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _tell(self, count: int) -> None:
        self._told = True
        self._told_bytes += count
        self._untold_bytes = 0

    def _too_large(self) -> Problem:
        most = self._settings.max_header_bytes
        return HeadersTooLarge(f"the head of the request is longer than {most} bytes (setting max_header_bytes)")

    def _hostless(self) -> Problem | None:
        """Refuse a request with two hosts, or one of HTTP/1.1 with none (RFC 9112, section 3.2)."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return BadRequest(f"a request names its Host once, not {hosts} times")
        return None

    def _expect(self) -> None:
        """A head, or the rest of a request that is answered, has to be here by the deadline."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._settings.header_timeout_seconds, self._overdue)

    def _expect_nothing(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _overdue(self) -> None:
        self._deadline = None
        if self.flow.read_paused or not self._answered:
            # Sent ahead of the answer to the request before: it is we who are to do something.
            self._expect()
        elif self._in_head:
            seconds = self._settings.header_timeout_seconds
            self._refuse(
                TooSlow(f"the head of the request took longer than {seconds:g} s (setting header_timeout_seconds)")
            )
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer what is no request, and takes no more."""
        self._refused = True
        PROBLEMS_TOTAL.labels(code=problem.code).inc()
        if not self._answered:
            # A refusal in the midst of an answer would be taken for a part of it.
            self.transport.abort()
            return
        self.transport.write(_written(problem))
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._expect_nothing()
        self._deadline = self.loop.call_later(self._settings.header_timeout_seconds, self.transport.abort)

    # ------------------------------------------------------------ what goes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_ended:
            self._expect_nothing()
        else:
            self._expect()
        if self.transport.get_write_buffer_size():
            self._watch()

    def _watch(self) -> None:
        """See to it that what is to be sent is taken."""
        if self._look is None:
            self._untaken_bytes, self._untaken_since = self._untaken(), self.loop.time()
            self._look_later()

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self._settings.idle_timeout_seconds / LOOKS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        if not self.transport.get_write_buffer_size():
            return
        before, self._untaken_bytes = self._untaken_bytes, self._untaken()
        if self._untaken_bytes != before:
            self._untaken_since = self.loop.time()
        elif self.loop.time() - self._untaken_since >= self._settings.idle_timeout_seconds:
            log.info("connection.cut", peer=self._address, untaken_bytes=before)
            self.transport.abort()
            return
        self._look_later()

    def _untaken(self) -> int:
        """Return bytes that the receiver has not acknowledged: what lies here, and what the system holds."""
        held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", held)[0])


class ShutdownMiddleware:
    """An application whose requests, if the process ends before they do, are told to come again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # The server cancels requests at its end alone. One that has begun to answer can say no more.
            problem = Unavailable("the coordinator is stopping", retry_after_seconds=1)
            with suppress(RuntimeError):
                await _Refusing(problem)(scope, receive, send)


class _Refusing:
    """An application that gives one answer and closes the connection."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        PROBLEMS_TOTAL.labels(code=self._problem.code).inc()
        content = json.dumps(self._problem.json()).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in _headers(self._problem, content)]
        await send({"type": "http.response.start", "status": self._problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _headers(problem: Problem, content: bytes) -> list[tuple[str, str]]:
    ours = {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(content)), "Connection": "close"}
    return [*(headers_of(problem) | ours).items()]


def _written(problem: Problem) -> bytes:
    """Return a whole answer."""
    content = json.dumps(problem.json()).encode()
    head = [f"HTTP/1.1 {problem.status} {http.HTTPStatus(problem.status).phrase}"]
    head += [f"{name}: {value}" for name, value in _headers(problem, content)]
    return "\r\n".join([*head, "", ""]).encode() + content
