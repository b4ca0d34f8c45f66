"""The server's side of the extension by which bulk bodies bypass its parser and its buffers.

Bodies under TLS, in chunks, or with an `Expect` header stay with the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httptools
import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tessera.coordinator.blobs.socket_transfer import EXTENSION, Piece, Run, SocketTransfer

log = structlog.get_logger()


class BulkHTTPProtocol(HttpToolsProtocol):
    """One connection whose application may move the body of a request or a response through the socket itself."""

    idle_timeout_seconds: float

    def __init__(self, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._parsed_body_bytes = 0
        self._dropping = 0

    def data_received(self, data: bytes) -> None:
        if self._dropping:
            dropped = min(self._dropping, len(data))
            self._dropping -= dropped
            self.on_body(b"")
            if not self._dropping:
                self.on_message_complete()
            data = data[dropped:]
        if data:
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._parsed_body_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._parsed_body_bytes += len(body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        if self.scheme == "http":
            cycle.scope["extensions"] = {EXTENSION: {"body": Bulk(self, cycle)}}
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def unparsed_body_bytes(self, cycle: RequestResponseCycle) -> int:
        """Return how many bytes of the request's body the parser has not seen; 0 if their number is unknown."""
        headers = dict(cycle.scope["headers"])
        if cycle is not self.cycle or b"transfer-encoding" in headers or cycle.waiting_for_100_continue:
            return 0
        return int(headers.get(b"content-length", 0)) - self._parsed_body_bytes

    def bypass_parser(self) -> None:
        """Read nothing from now on. The next bytes for the parser will be those of the next request."""
        self.flow.pause_reading()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def end_bypass(self, left: int) -> None:
        """Read on, with `left` bytes of the body to be dropped."""
        self._dropping = left
        if not left:
            self.on_message_complete()
        self.flow.resume_reading()


class Bulk:
    """A `BulkBody` of this server."""

    def __init__(self, protocol: BulkHTTPProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self.received = self.sent = 0

    @property
    def length(self) -> int:
        left = self._protocol.unparsed_body_bytes(self._cycle)
        return left + len(self._cycle.body) if left else 0

    async def receive(self, consume: Callable[[memoryview], None], run: Run) -> None:
        protocol, cycle = self._protocol, self._cycle
        count = protocol.unparsed_body_bytes(cycle)
        if not protocol.transport.is_closing():
            protocol.bypass_parser()
        begun, cycle.body = memoryview(bytes(cycle.body)), bytearray()

        def counted(piece: memoryview) -> None:
            self.received += len(piece)
            consume(piece)

        def begin() -> bool:
            counted(begun)
            return False

        left = count
        try:
            if begun:
                await run(begin)
            if protocol.transport.is_closing():
                raise ClientDisconnect
            transfer = self._transfer()
            try:
                await transfer.receive(count, counted, run)
            finally:
                left = count - transfer.moved
                transfer.close()
        finally:
            if not protocol.transport.is_closing():
                protocol.end_bypass(left)

    async def send(self, pieces: Iterator[Piece], run: Run) -> None:
        protocol, cycle = self._protocol, self._cycle
        # A closed transport refuses to be asked for anything else.
        if not protocol.transport.is_closing():
            # The head first: what the server still holds must not come after these bytes.
            protocol.transport.set_write_buffer_limits(0)
            await protocol.flow.drain()
        if protocol.transport.is_closing():
            cycle.disconnected = True
            return
        protocol.transport.set_write_buffer_limits()
        transfer = self._transfer()
        try:
            await transfer.send(pieces, run)
        except (TimeoutError, ConnectionError, FileNotFoundError) as fault:
            # The file of a blob that is not kept any more is removed while others may still fetch it.
            log.info("connection.cut", peer=protocol.client and protocol.client[0], reason=type(fault).__name__)
            protocol.transport.abort()
            cycle.disconnected = True
        finally:
            self.sent += transfer.moved
            cycle.expected_content_length -= transfer.moved
            transfer.close()

    def _transfer(self) -> SocketTransfer:
        descriptor = self._protocol.transport.get_extra_info("socket").fileno()
        return SocketTransfer(descriptor, self._protocol.idle_timeout_seconds)
