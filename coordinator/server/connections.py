"""Connections from their acceptance: how many there are, their TLS handshakes, and what is read of them."""

import asyncio
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import structlog
import uvicorn

from tessera.coordinator.settings import CoordinatorSettings
from tessera.coordinator.telemetry.metrics import CONNECTIONS
from tessera.shared.problems import Busy, Problem

log = structlog.get_logger()

RETRY_SECONDS = 5.0
"""Time after which a refused client may retry."""

HEAD_READ_BYTES, BODY_READ_BYTES = 8 << 10, 64 << 10
"""Bytes read at a time from a connection: what comes with a head stays in memory until the request is admitted."""

BEGUN_AT_ONCE = 4
"""Connections and requests that begin in one turn of the event loop: each may take a millisecond of it."""

ACCEPTED_AT_ONCE = 256
"""Connections that are accepted in one turn of the event loop, in some microseconds each."""

PAUSE_SECONDS = 0.5
"""Time without accepting when no file is left."""

TURNED_AWAY = 256
"""Connections beyond the limit that get a response; further ones are closed without one."""

PROBE = "/healthz/live"
"""The path of requests that wait only for others of it."""

PROBE_LINE = f"GET {PROBE} ".encode()


class ConnectionLimiter:
    """The number of connections, in all and from each address."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self._by_address: Counter[str] = Counter()
        self.total = 0
        self.connections, self.requests, self.probes = Turns(), Turns(), Turns()
        """Turns of requests on open connections do not wait for new connections, nor either for probes: anyone may
        send any number of these."""
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


class Turns:
    """Begins connections and requests a few at a time, so that between them the event loop turns to those in progress
    and to probes, however many come at once."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def begin(self, start: Callable[[], None]) -> None:
        """Begin a connection or a request once those before it have begun."""
        self._waiting.append(start)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        try:
            for _ in range(min(BEGUN_AT_ONCE, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            self._scheduled = bool(self._waiting)
            if self._scheduled:
                asyncio.get_running_loop().call_soon(self._begin_some)


class ServerConfig(uvicorn.Config):
    """A configuration whose TLS context is that of `Server`'s connections."""

    limiter: ConnectionLimiter
    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.tls, self.ssl = self.ssl, None


class Server(uvicorn.Server):
    """A server that takes all connections that wait, counts them, and begins them in turns.

    An event loop's own server takes one a turn, and reports one of TLS after its handshake: a probe would wait until
    all connections before it have been served.
    """

    config: ServerConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.listeners = listening(self.config.host, self.config.port) if sockets is None else sockets
        self._tasks = set[asyncio.Task[None]]()
        for listener in self.listeners:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
        await super().startup(sockets=[])
        for listener in self.listeners:
            self._listen(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await super().shutdown()

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, (address, *_) = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as fault:
                # No file is left: the others wait in the system.
                log.warning("connection.refused", reason=fault.strerror)
                loop.remove_reader(listener)
                loop.call_later(PAUSE_SECONDS, self._listen, listener)
                return
            self._take(connection, address)

    def _take(self, connection: socket.socket, address: str) -> None:
        limiter, tls = self.config.limiter, self.config.tls
        refusal = limiter.enter(address)
        if refusal and (tls or limiter.total > limiter.settings.max_connections + TURNED_AWAY):
            limiter.leave(address)
            connection.close()
        else:
            turns = limiter.probes if not tls and _probes(connection) else limiter.connections
            turns.begin(partial(self._start, connection, address, refusal))

    def _start(self, connection: socket.socket, address: str, refusal: Problem | None) -> None:
        task = asyncio.get_running_loop().create_task(self._follow(connection, address, refusal))
        # The event loop does not keep it.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, connection: socket.socket, address: str, refusal: Problem | None) -> None:
        config, tls = self.config, self.config.tls
        make: Any = config.http_protocol_class
        protocol = make(
            address=address,
            turned_away=refusal,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        seconds = config.limiter.settings.header_timeout_seconds if tls else None
        try:
            # At its end as at its begin: a silent client would hold its connection for 30 s more.
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
            if self.should_exit:
                # `shutdown` may have ended the other connections already.
                protocol.shutdown()
        except OSError:
            connection.close()
        finally:
            # Else the protocol does it, once the connection is lost.
            if protocol.transport is None:
                config.limiter.leave(address)


def listening(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of the host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        listeners = [
            opened.enter_context(socket.create_server(address, family=family))
            for family, *_, address in dict.fromkeys(found)
            if family != socket.AF_INET6 or socket.has_dualstack_ipv6()
        ]
        opened.pop_all()
    return listeners


def _probes(connection: socket.socket) -> bool:
    """Return True if the connection begins with a probe, as far as its bytes have come."""
    with suppress(OSError):
        return connection.recv(len(PROBE_LINE), socket.MSG_PEEK | socket.MSG_DONTWAIT) == PROBE_LINE
    return False


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
