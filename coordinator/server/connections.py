"""Connections from their acceptance: how many there are, their TLS handshakes, and what is read of them.

A server with a TLS context reports a connection to its protocol only after the handshake, and waits a minute for it.
"""

import asyncio
import os
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.utils import get_remote_addr

from tessera.coordinator.settings import CoordinatorSettings
from tessera.coordinator.telemetry.metrics import CONNECTIONS
from tessera.shared.problems import Busy, Problem

log = structlog.get_logger()

RETRY_SECONDS = 5.0
"""Time after which a refused client may retry."""

HEAD_READ_BYTES, BODY_READ_BYTES = 8 << 10, 64 << 10
"""Bytes read at a time from a connection: what comes with a head stays in memory until the request is admitted."""

REQUESTS_AT_ONCE = 8
"""Requests that begin in one turn of the event loop: each may take a millisecond of it."""


class ConnectionLimiter:
    """The number of connections, in all and from each address."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self._by_address: Counter[str] = Counter()
        self.total = 0
        self.turns = RequestTurns()
        self.handshakes: set[asyncio.Task[None]] = set()
        self.read_buffer = memoryview(bytearray(BODY_READ_BYTES))
        """Of all connections: only one of them reads at a time."""

    def enter(self, address: str) -> Problem | None:
        """Count a connection; return the reason to refuse it, if there is one. Call `leave` at its end."""
        self._by_address[address] += 1
        self.total += 1
        CONNECTIONS.inc()
        most, each = self.settings.max_connections, self.settings.most_per_address
        if self.total > most:
            return Busy(f"{most} connections are open (setting max_connections)", retry_after_seconds=RETRY_SECONDS)
        if each is not None and self._by_address[address] > each:
            return Busy(
                f"{each} connections from your address are open (setting max_connections_per_address)",
                retry_after_seconds=RETRY_SECONDS,
            )
        return None

    def leave(self, address: str) -> None:
        CONNECTIONS.dec()
        self.total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class RequestTurns:
    """Begins requests a few at a time, so that between them the event loop turns to those in progress and to probes,
    however many come at once."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def begin(self, request: Callable[[], None]) -> None:
        """Begin a request once those before it have begun."""
        self._waiting.append(request)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        try:
            for _ in range(min(REQUESTS_AT_ONCE, len(self._waiting))):
                # It is in the queue meanwhile, so that what it begins does not schedule another turn.
                try:
                    self._waiting[0]()
                finally:
                    self._waiting.popleft()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._begin_some)


class ServerConfig(uvicorn.Config):
    """A configuration whose TLS context is not the server's, but that of `TLSHandshake`."""

    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.tls, self.ssl = self.ssl, None


class TLSHandshake(asyncio.Protocol):
    """A TCP connection up to the end of its handshake; an HTTP connection follows it. One beyond the limits is
    closed."""

    def __init__(
        self,
        limiter: ConnectionLimiter,
        follow: Callable[..., asyncio.Protocol],
        config: ServerConfig,
        **uvicorns: Any,
    ) -> None:
        """`follow` makes the protocol of HTTP."""
        self._limiter, self._context = limiter, config.tls
        self._follow = partial(follow, is_counted=True, config=config, **uvicorns)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        host = get_remote_addr(transport)  # type: ignore[arg-type]  # one of TCP
        address = host[0] if host else ""
        try:
            if self._limiter.enter(address):
                self._limiter.leave(address)
            else:
                self._begin(transport, address)
        finally:
            transport.abort()  # type: ignore[attr-defined]

    def _begin(self, transport: asyncio.BaseTransport, address: str) -> None:
        try:
            # Of a copy, since the server's transport begins to read as soon as this returns.
            connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError as fault:
            # No file is left.
            log.warning("connection.refused", reason=fault.strerror)
            self._limiter.leave(address)
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection, address))
        # The event loop does not keep it.
        self._limiter.handshakes.add(task)
        task.add_done_callback(self._limiter.handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, address: str) -> None:
        loop, seconds = asyncio.get_running_loop(), self._limiter.settings.header_timeout_seconds
        followed = False
        try:
            await loop.connect_accepted_socket(
                self._follow, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
            followed = True
        except OSError:
            connection.close()
        finally:
            if not followed:
                self._limiter.leave(address)


class BoundedReader(asyncio.BufferedProtocol):
    """Reads for a protocol only as many bytes at a time as it has use for. A plain one gets 256 KB, unasked."""

    def __init__(self, protocol: asyncio.Protocol, use: Callable[[], int], buffer: memoryview) -> None:
        self._protocol, self._use, self._buffer = protocol, use, buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._use()]

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._buffer[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
