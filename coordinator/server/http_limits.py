"""Limits on HTTP connections.

Uvicorn limits neither the bytes of a request's head, nor the time to send one or to read a response, nor the number
of connections. This module does. Limits on time follow progress: a slow but active peer is never disconnected.
"""

import asyncio
import fcntl
import http
import json
import resource
import ssl
import struct
import termios
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tessera.coordinator.api.errors import headers_of
from tessera.coordinator.server.connections import (
    BODY_READ_BYTES,
    HEAD_READ_BYTES,
    PROBE,
    BoundedReader,
    ConnectionLimiter,
    ServerConfig,
    listening,
)
from tessera.coordinator.server.path_prefix import PathPrefix
from tessera.coordinator.settings import CoordinatorSettings
from tessera.coordinator.telemetry.metrics import PROBLEMS_TOTAL
from tessera.shared.diagnostics import pem_fault, reason_of
from tessera.shared.problems import MEDIA_TYPE, BadRequest, HeadersTooLarge, Problem, TooSlow, Unavailable
from tessera.shared.urls import is_loopback

MAX_HEADER_BYTES = 16_384
"""Of a request's head, in which each header counts 128 bytes more."""

log = structlog.get_logger()

GRACE_SECONDS = 5
"""Time for open requests when the process stops."""

OTHER_FILES = 1_024
"""File descriptors besides connections: databases, blobs, staging files."""

MAX_PIPELINED = 32
"""Most requests sent ahead of the first response: uvicorn queues any number of them."""

HEADER_BYTES = 128
"""Bytes that each header counts besides its own: so much do its Python objects take."""

LOOKS = 4
"""Checks within `idle_timeout_seconds` of whether a receiver has read anything."""


def configuration(app: ASGIApp, settings: CoordinatorSettings) -> ServerConfig:
    """Return the configuration of the server that `serve` runs."""
    limiter = ConnectionLimiter(settings)
    config = ServerConfig(
        OutermostMiddleware(PathPrefix(app, settings.public_path) if settings.public_path else app),
        host=settings.host,
        port=settings.port,
        http=partial(LimitedHTTPProtocol, limiter),  # type: ignore[arg-type]  # a callable
        # No route uses WebSockets, and their protocol would have no limits.
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
        # Of TLS 1.2, the suites with authenticated encryption; all of TLS 1.3 have it.
        ssl_ciphers="ECDHE+AESGCM:ECDHE+CHACHA20",
        # Any process of this machine could name another address.
        proxy_headers=settings.behind_proxy,
    )
    config.limiter = limiter
    return config


class InsecureBindError(RuntimeError):
    """The settings would send tokens and updates in plain text over the network."""


class PortInUseError(RuntimeError):
    """The address of the settings is in use or not permitted."""


class BadCertificate(RuntimeError):
    """The certificate files of the settings cannot be used for TLS."""


def require_private(settings: CoordinatorSettings) -> None:
    """Raise InsecureBindError if other machines would be served in plain HTTP, and BadCertificate."""
    if settings.tls_cert is None:
        if not (settings.behind_proxy or is_loopback(settings.host)):
            raise InsecureBindError(
                f"TESSERA_HOST={settings.host} serves other machines without TLS: tokens and updates could be read "
                "on the network. Set TESSERA_TLS_CERT and TESSERA_TLS_KEY, or set TESSERA_BEHIND_PROXY=true if a "
                "proxy terminates TLS and only it can reach this address."
            )
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.tls_client_ca)
    except OSError as fault:
        authorities = f"TESSERA_TLS_CLIENT_CA: {settings.tls_client_ca} cannot be used: {reason_of(fault)}"
        raise BadCertificate(f"{authorities}. Name a PEM file with the CAs of clients") from fault
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as fault:
        remedy = "Name PEM files that this user may read in TESSERA_TLS_CERT, and the key perhaps in TESSERA_TLS_KEY."
        reason = pem_fault(fault, settings.tls_cert, settings.tls_key)
        raise BadCertificate(f"TLS cannot be served: {reason}. {remedy}") from fault


def require_free(settings: CoordinatorSettings) -> None:
    """Raise PortInUseError if the server could not listen: before the first token is created and printed."""
    try:
        for listener in listening(settings.host, settings.port):
            listener.close()
    except OSError as fault:
        raise PortInUseError(
            f"cannot listen on {settings.host}:{settings.port}: {fault.strerror or fault}. Set another TESSERA_PORT "
            "or TESSERA_HOST, or stop the process that uses it."
        ) from fault


def raise_file_limit(connections: int) -> None:
    """Raise this process's limit on open files to the need of its connections, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning("coordinator.few_files", allowed=allowed, wanted=wanted)


class LimitedHTTPProtocol(HttpToolsProtocol):
    """One connection with limits on the bytes and time of a request's head, and on how long a receiver may read
    nothing of a response."""

    def __init__(
        self, limiter: ConnectionLimiter, address: str, turned_away: Problem | None, **uvicorns: Any
    ) -> None:
        """Serve a connection that the limiter has counted for its address, or refuse its requests for that reason."""
        super().__init__(**uvicorns)
        self._limiter, self._address = limiter, address
        self._settings = limiter.settings
        self._turned_away = turned_away
        self._refused = False
        # The head of the current request: bytes that the parser reported, and bytes fed to it since.
        self._in_head = False
        self._parsed_bytes = 0
        self._unparsed_bytes = 0
        self._parsed = False
        self._body_ended = True
        self._deadline: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        # The responses: bytes unread at the last check, and since when there are as many.
        self._check_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.scheme == "http":
            transport.set_protocol(BoundedReader(self, self._useful_bytes, self._limiter.read_buffer))
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.leave(self._address)
        self._cancel_deadline()
        if self._check_timer:
            self._check_timer.cancel()
        if self._answering:
            # Uvicorn tells the last of several requests only.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    # ------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        if self._refused:
            # Read and dropped: with unread data, the refusal might never arrive.
            return
        self._parsed = False
        super().data_received(data)
        self._unparsed_bytes = 0 if self._parsed else self._unparsed_bytes + len(data)
        if not self._parsed and self._answered:
            # Line breaks between two requests would keep a connection open forever.
            self._start_deadline()
        if self._head_bytes > MAX_HEADER_BYTES and not self._refused:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise BadRequest(f"more than {MAX_PIPELINED} requests were sent ahead of their responses")
        super().on_message_begin()
        self._parsed = True
        self._parsed_bytes = self._unparsed_bytes = 0
        self._in_head, self._body_ended = True, False
        self._start_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        turns = self._limiter.probes if cycle.scope["path"] == PROBE else self._limiter.requests
        turns.begin(partial(super()._start_asgi_task, cycle, app))
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in cycle.scope["headers"]):
            # Until the application asks for the body.
            self.flow.pause_reading()

    def _useful_bytes(self) -> int:
        """Return the number of bytes to read at a time."""
        return HEAD_READ_BYTES if self._in_head or self._body_ended else BODY_READ_BYTES

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_BYTES)
        # Fields after a body could pass a proxy that sets or removes such headers (RFC 9110, section 6.5.1).
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._parsed = True
        self._in_head = False
        self._cancel_deadline()
        too_large = self._head_bytes > MAX_HEADER_BYTES
        refusal = self._too_large() if too_large else self._turned_away or self._bad_host()
        if refusal:
            self._refused = True
            self.app = _refusal(refusal)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._parsed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._parsed = self._body_ended = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg))

    @property
    def _head_bytes(self) -> int:
        return self._parsed_bytes + self._unparsed_bytes

    @property
    def _answered(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _count(self, count: int) -> None:
        self._parsed = True
        self._parsed_bytes += count
        self._unparsed_bytes = 0

    def _too_large(self) -> Problem:
        return HeadersTooLarge(f"the head of the request is longer than {MAX_HEADER_BYTES} bytes")

    def _bad_host(self) -> Problem | None:
        """Refuse a request with two hosts, or one of HTTP/1.1 with none (RFC 9112, section 3.2)."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            return BadRequest(f"the request has {hosts} Host headers, not 1")
        return None

    def _start_deadline(self) -> None:
        """Start the deadline for a head, or for the rest of a request whose response was sent."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._settings.header_timeout_seconds, self._overdue)

    def _cancel_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _overdue(self) -> None:
        self._deadline = None
        if self.flow.read_paused or not self._answered:
            # Sent ahead of the previous response: the delay is on this side.
            self._start_deadline()
        elif self._in_head:
            seconds = self._settings.header_timeout_seconds
            self._refuse(
                TooSlow(f"the head of the request took longer than {seconds:g} s (setting header_timeout_seconds)")
            )
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Respond to an invalid request, and accept no more."""
        self._refused = True
        response = _refusal(problem)
        if not self._answered:
            # Within a response, the refusal would be read as a part of it.
            self.transport.abort()
            return
        status = http.HTTPStatus(problem.status)
        headers = (b"%s: %s" % header for header in response.raw_headers)
        head = [f"HTTP/1.1 {status} {status.phrase}".encode(), *headers]
        self.transport.write(b"\r\n".join([*head, b"", response.body]))
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._cancel_deadline()
        self._deadline = self.loop.call_later(self._settings.header_timeout_seconds, self.transport.abort)

    # ------------------------------------------------------------ responses

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_ended:
            self._cancel_deadline()
        else:
            self._start_deadline()
        if self.transport.get_write_buffer_size():
            self._watch()

    def _watch(self) -> None:
        """Check from now on that the receiver reads."""
        if self._check_timer is None:
            self._unread_bytes, self._unread_since = self._unread(), self.loop.time()
            self._check_later()

    def _check_later(self) -> None:
        self._check_timer = self.loop.call_later(self._settings.idle_timeout_seconds / LOOKS, self._check)

    def _check(self) -> None:
        self._check_timer = None
        if not self.transport.get_write_buffer_size():
            return
        before, self._unread_bytes = self._unread_bytes, self._unread()
        if self._unread_bytes != before:
            self._unread_since = self.loop.time()
        elif self.loop.time() - self._unread_since >= self._settings.idle_timeout_seconds:
            log.info("connection.cut", peer=self._address, untaken_bytes=before)
            self.transport.abort()
            return
        self._check_later()

    def _unread(self) -> int:
        """Return the bytes that the receiver has not acknowledged, in this process and in the kernel."""
        queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", queued)[0])


class OutermostMiddleware:
    """Responds with Unavailable to requests that the end of the process interrupts, and frees what others left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # The server cancels requests only when it stops. A started response cannot be replaced.
            problem = Unavailable("the coordinator is stopping", retry_after_seconds=1)
            with suppress(RuntimeError):
                await _refusal(problem)(scope, receive, send)
        finally:
            # The connection refers to it until the next request, and it to the connection: a collection of thousands
            # of them would stop the process for longer than a probe may take.
            scope.clear()


def _refusal(problem: Problem) -> Response:
    """Count a problem, and return the response that reports it and closes the connection."""
    PROBLEMS_TOTAL.labels(code=problem.code).inc()
    headers = headers_of(problem) | {"Connection": "close"}
    return Response(json.dumps(problem.json()), problem.status, headers, MEDIA_TYPE)
