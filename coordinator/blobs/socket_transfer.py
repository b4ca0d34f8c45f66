"""Bodies that threads move between a socket and files, past the copies of the HTTP server.

A thread moves bytes while the socket is ready, up to `TURN_BYTES`, so that others get their turn. Between two turns a
body holds neither a thread nor a buffer: it waits in the event loop until the kernel has enough bytes, or room for
them. So the memory of any number of bodies is a buffer for each thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import struct
import termios
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Scope

LEAST_BYTES_PER_SECOND = 1024
"""Minimum rate of a sender: a slower one would keep its reservations and its connection for ever."""

RATE_SECONDS = 120.0
"""Time over which the rate is measured."""

EXTENSION = "tessera.bulk"
"""The name of the ASGI extension whose `body` is a `BulkBody`. A server without it passes bodies as messages."""

BULK_BYTES = 1 << 20
"""The smallest body for which a transfer costs less than messages."""

PIECE_BYTES = 1 << 18
"""Bytes received at a time: they are still in the core's cache when they are hashed and written."""

TURN_BYTES = 16 << 20

PAUSE_MS = 5
"""Time that a thread waits for a socket that was just busy, before it gives up its turn."""

LOOKS = 4
"""Checks within the idle timeout of whether the peer has moved a byte."""


@dataclass
class FilePart:
    """Bytes `start` to `stop` of a file, still to be sent."""

    path: Path
    start: int
    stop: int

    def send(self, to: socket.socket) -> int:
        """Send as many bytes as the socket accepts. Raise BlockingIOError if it accepts none."""
        with self.path.open("rb", buffering=0) as file:
            count = os.sendfile(to.fileno(), file.fileno(), self.start, self.stop - self.start)
        if not count:
            raise EOFError(f"{self.path} ends at byte {self.start}, before byte {self.stop}")
        self.start += count
        return count

    def __len__(self) -> int:
        return self.stop - self.start


Piece = FilePart | memoryview
Work = Callable[[], bool]
Run = Callable[[Work], Awaitable[bool]]
"""Runs work in a thread, and waits for its end also when the caller is cancelled."""


class BulkBody(Protocol):
    """The body of one request or response, as a server offers it to an application for a `SocketTransfer`."""

    received: int
    """Bytes passed to `consume`."""
    sent: int

    @property
    def length(self) -> int:
        """Bytes of the request's body that the application has not received; 0 if only messages bring them."""
        ...

    async def receive(self, consume: Callable[[memoryview], None], run: Run) -> None:
        """Pass the request's body to `consume`, piece by piece, in threads. Raises TimeoutError if the sender is
        silent for `idle_timeout_seconds` or slower than `LEAST_BYTES_PER_SECOND`, and ClientDisconnect."""
        ...

    async def send(self, pieces: Iterator[Piece], run: Run) -> None:
        """Send part of the response's body, after its head; `pieces` is read in threads. Returns early if the
        receiver has gone, or reads nothing for `idle_timeout_seconds`."""
        ...


def require_rate(count: int, seconds: float) -> bool:
    """Return whether the time suffices to judge a sender's rate. Raise TimeoutError if it is below the minimum."""
    if seconds >= RATE_SECONDS and count < LEAST_BYTES_PER_SECOND * seconds:
        raise TimeoutError
    return seconds >= RATE_SECONDS


def bulk_of(scope: Scope) -> BulkBody | None:
    """Return what the server offers for a request, if it has the extension."""
    bulk: BulkBody | None = scope.get("extensions", {}).get(EXTENSION, {}).get("body")
    return bulk


class SocketTransfer:
    """One body that is moved through a socket in turns."""

    def __init__(self, descriptor: int, idle_timeout_seconds: float) -> None:
        # A descriptor of its own: the event loop watches the server's, and may close it while a thread uses it.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.setblocking(False)
        self._idle_seconds = idle_timeout_seconds
        self.moved = 0

    def close(self) -> None:
        self._await_bytes(1)
        self._socket.close()

    # ------------------------------------------------------------ receiving

    async def receive(self, count: int, consume: Callable[[memoryview], None], run: Run) -> None:
        """Pass the next `count` bytes to `consume`. Raises TimeoutError and ClientDisconnect."""
        turn = partial(self._receive_turn, count, consume)
        while self.moved < count:
            self._await_bytes(min(PIECE_BYTES, count - self.moved))
            await self._ready(writing=False)
            if await run(turn):
                raise ClientDisconnect

    def _receive_turn(self, count: int, consume: Callable[[memoryview], None]) -> bool:
        """Move bytes while there are some. Return whether the sender has gone."""
        start = self.moved
        stop = min(count, start + TURN_BYTES)
        while self.moved < stop:
            buffer = _buffer()[: stop - self.moved]
            filled, ended = self._fill(buffer)
            # Counted before they are consumed: they have left the socket.
            self.moved += filled
            if filled:
                consume(buffer[:filled])
            if ended:
                return True
            if filled < len(buffer) and not (self.moved - start >= PIECE_BYTES and self._pause(select.POLLIN)):
                break
        return False

    def _fill(self, buffer: memoryview) -> tuple[int, bool]:
        """Return how many bytes were received, and whether the sender has gone."""
        filled = 0
        with suppress(BlockingIOError):
            while filled < len(buffer):
                try:
                    count = self._socket.recv_into(buffer[filled:])
                except ConnectionError:
                    return filled, True
                if not count:
                    return filled, True
                filled += count
        return filled, False

    def _await_bytes(self, count: int) -> None:
        """Have the socket count as readable from that many bytes on: a turn for each packet would cost more."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    # ------------------------------------------------------------ sending

    async def send(self, pieces: Iterator[Piece], run: Run) -> None:
        """Send the pieces. Raises TimeoutError and ConnectionError."""
        self._piece: Piece = memoryview(b"")
        turn = partial(self._send_turn, pieces)
        while await run(turn):
            await self._ready(writing=True)

    def _send_turn(self, pieces: Iterator[Piece]) -> bool:
        """Move bytes while there is room. Return whether there are more to send."""
        start = self.moved
        while self.moved - start < TURN_BYTES:
            while not len(self._piece):
                if (piece := next(pieces, None)) is None:
                    return False
                self._piece = piece
            try:
                self.moved += self._send_some()
            except BlockingIOError:
                if not (self.moved - start >= PIECE_BYTES and self._pause(select.POLLOUT)):
                    break
        return True

    def _send_some(self) -> int:
        if isinstance(self._piece, FilePart):
            return self._piece.send(self._socket)
        count = self._socket.send(self._piece, socket.MSG_MORE)
        self._piece = self._piece[count:]
        return count

    # ------------------------------------------------------------ waiting

    def _pause(self, event: int) -> bool:
        """Return whether the socket becomes ready within `PAUSE_MS`."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(PAUSE_MS))

    async def _ready(self, *, writing: bool) -> None:
        """Wait until the socket is ready. Raises TimeoutError if the peer moves no byte in time, or sends too
        slowly."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        add(self._socket.fileno(), ready.set)
        try:
            progress, since = self._progress(writing=writing), loop.time()
            first, began_at = progress, since
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_seconds / LOOKS):
                        await ready.wait()
                    return
                if (now := self._progress(writing=writing)) != progress:
                    progress, since = now, loop.time()
                elif loop.time() - since >= self._idle_seconds:
                    raise TimeoutError
                if not writing:
                    # More bytes than this rate brings in that time would have ended the wait.
                    require_rate(progress - first, loop.time() - began_at)
        finally:
            remove(self._socket.fileno())

    def _progress(self, *, writing: bool) -> int:
        """Return the bytes that the peer has moved so far: sent, or else acknowledged."""
        request = termios.TIOCOUTQ if writing else termios.FIONREAD
        (queued,) = struct.unpack("i", fcntl.ioctl(self._socket, request, bytes(4)))
        return self.moved - int(queued) if writing else self.moved + int(queued)


_OF_THREAD = threading.local()


def _buffer() -> memoryview:
    """Return this thread's buffer."""
    if not hasattr(_OF_THREAD, "buffer"):
        _OF_THREAD.buffer = memoryview(bytearray(PIECE_BYTES))
    return _OF_THREAD.buffer  # type: ignore[no-any-return]
