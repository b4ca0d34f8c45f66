"""An httpx transport that sends and receives large bodies without copying them within the process.

httpx's own transport passes bodies through h11, which copies each byte several times. Requests marked as bulk go
through `http.client` instead: a body is received straight into the piece that is handed out, and a file is sent from
one recycled buffer. All else about a request stays httpx's: its URL, headers, authentication, timeouts and errors.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import BinaryIO, cast

import httpx

BULK = "tessera.bulk"
"""The request's extension that marks it."""

PIECE_BYTES = 1 << 18
"""Bytes received or sent at once: few system calls, and still in a core's second cache when they are hashed."""


@dataclass(frozen=True)
class FilePart:
    """The body of a request: `head`, and behind it `count` bytes of a seekable file from `offset`. `sent` receives
    the size of each piece of the file."""

    file: BinaryIO
    offset: int
    count: int
    sent: Callable[[int], object] = lambda _: None
    head: bytes = b""

    def __len__(self) -> int:
        return len(self.head) + self.count

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the bytes in pieces, each of which is valid until the next one."""
        if self.head:
            yield memoryview(self.head)
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.count)))
        self.file.seek(self.offset)
        left = self.count
        while left:
            got = self.file.readinto(buffer[:left])  # type: ignore[attr-defined]
            _require_bytes(got, left)
            left -= got
            yield buffer[:got]
            self.sent(got)


class BulkTransport(httpx.HTTPTransport):
    """httpx's transport, except for requests with the extension `BULK`. Does not use proxies."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(verify=context)
        self._context = context
        self._idle: list[http.client.HTTPConnection] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if BULK not in request.extensions:
            return super().handle_request(request)
        connection = self._connected(request)
        try:
            _send(connection, request)
            response = _answer(connection)
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            response.status, headers=response.getheaders(), stream=_Body(connection, response, self._idle)
        )

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        super().close()

    def _connected(self, request: httpx.Request) -> http.client.HTTPConnection:
        timeouts = request.extensions["timeout"]
        while self._idle:
            connection = self._idle.pop()
            # The server has closed an idle connection that can be read.
            if not wait([connection.sock], 0):
                connection.sock.settimeout(timeouts["read"])
                return connection
            connection.close()
        host, port, timeout = request.url.raw_host.decode("ascii"), request.url.port, timeouts["connect"]
        if request.url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        with _errors(httpx.ConnectTimeout, httpx.ConnectError):
            connection.connect()
        connection.sock.settimeout(timeouts["read"])
        return connection


def _send(connection: http.client.HTTPConnection, request: httpx.Request) -> None:
    connection.putrequest(
        request.method, request.url.raw_path.decode("ascii"), skip_host=True, skip_accept_encoding=True
    )
    for name, value in request.headers.raw:
        connection.putheader(name, value)
    try:
        with _errors(httpx.WriteTimeout, httpx.WriteError):
            connection.endheaders()
            for piece in cast("httpx.SyncByteStream", request.stream):
                connection.send(piece)
    except httpx.WriteError:
        # The server may have refused the body and closed the connection; its answer says why.
        return


def _answer(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    with _errors(httpx.ReadTimeout, httpx.ReadError):
        response = connection.getresponse()
    if response.status < 300 and response.length is None and not response.chunked:
        # Its end could not be told from a connection that broke, not even within the headers.
        raise httpx.RemoteProtocolError("the answer does not state its length")
    return response


@dataclass(frozen=True)
class _Body(httpx.SyncByteStream):
    """A response's body. Its connection becomes idle once all of it was read."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    idle: list[http.client.HTTPConnection]

    def __iter__(self) -> Iterator[bytes]:
        response = self.response
        with _errors(httpx.ReadTimeout, httpx.ReadError):
            # As received: to collect larger pieces would delay the caller's progress on a slow line.
            while piece := response.read1(PIECE_BYTES):
                yield piece
            if response.length:
                raise httpx.RemoteProtocolError(f"the connection ended {response.length} bytes before the body did")
            response.read()

    def close(self) -> None:
        if self.response.isclosed() and not self.response.will_close and self.connection.sock:
            self.idle.append(self.connection)
        else:
            # It holds the socket of a connection that the server will close.
            self.response.close()
            self.connection.close()


@contextmanager
def _errors(timeout: type[httpx.TimeoutException], broken: type[httpx.NetworkError]) -> Iterator[None]:
    """Convert the errors of sockets and of `http.client` to httpx's."""
    try:
        yield
    except TimeoutError as fault:
        raise timeout(str(fault)) from fault
    except OSError as fault:
        raise broken(str(fault)) from fault
    except http.client.HTTPException as fault:
        raise httpx.RemoteProtocolError(str(fault) or "the server closed the connection") from fault


def _require_bytes(got: int, left: int) -> None:
    if not got:
        raise httpx.LocalProtocolError(f"the file ended {left} bytes before the part that is to be sent")
