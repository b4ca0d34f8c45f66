"""A userspace traffic shaper: TCP passed on at a rate and after a delay, in a process of its own.

Each client has a line, with the same rate and delay both ways, which its connections share. The bytes that enter a
line leave it at the line's rate, and arrive half a round trip later; a new connection passes nothing for one round
trip, which the handshake of TCP takes. A line holds what is on its way and a little more, so that a sender sees the
line's speed. Loss, slow start and the headers of packets are left out.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from benchmarks.network import HOST, Moved

AHEAD_SECONDS = 0.02
"""What a sender may be ahead of its line: hides that this process wakes up late."""

PIECE_SECONDS = 0.004
MIN_PIECE_BYTES = 1 << 14
MAX_PIECE_BYTES = 1 << 18

SEGMENT_BYTES = 1 << 13
"""The kernel sizes a sender's buffer by the segments of its line, which are 64 KiB long on loopback."""


@dataclass(frozen=True)
class Line:
    """The rate in each direction, and the time from sending a byte to receiving its echo."""

    megabits_per_second: float
    round_trip_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.megabits_per_second * 1e6 / 8

    @property
    def piece_bytes(self) -> int:
        return int(min(max(self.bytes_per_second * PIECE_SECONDS, MIN_PIECE_BYTES), MAX_PIECE_BYTES))

    @property
    def held_bytes(self) -> int:
        """The most that one direction of a connection holds."""
        seconds = self.round_trip_seconds / 2 + AHEAD_SECONDS
        return int(self.bytes_per_second * seconds) + 2 * self.piece_bytes

    def seconds(self, nbytes: float) -> float:
        """Return the time that bytes take at the line's rate."""
        return nbytes / self.bytes_per_second

    def __str__(self) -> str:
        return f"{self.megabits_per_second:g} Mbit/s, {1e3 * self.round_trip_seconds:g} ms"


class Shaper:
    """The process of all lines of one kind. Used with `with`."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def __enter__(self) -> Self:
        shown = map(str, (self.line.megabits_per_second, self.line.round_trip_seconds))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *shown], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, target: int) -> int:
        """Return the port of a new line to the port `target`."""
        (port,) = self._answer(f"open {target}")
        return port

    def moved(self) -> Moved:
        """Return the bytes that have entered all lines."""
        return Moved(*self._answer("moved"))

    def _answer(self, command: str) -> list[int]:
        if not (self._process.stdin and self._process.stdout):
            raise RuntimeError("the shaper has no pipes")
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the shaper ended with {self._process.wait()}")
        return [int(number) for number in answer.split()]


# ---------------------------------------------------------------- its process


class Direction:
    """One direction of one line, which the line's connections share."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.moved = 0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def await_turn(self) -> None:
        """Return once the line is at most `AHEAD_SECONDS` behind."""
        while (early := self._free_at - AHEAD_SECONDS - monotonic()) > 0:
            sleep(early)

    def enter(self, nbytes: int) -> float:
        """Put bytes on the line and return when the last of them arrives."""
        with self._lock:
            self.moved += nbytes
            self._free_at = max(monotonic(), self._free_at) + self.line.seconds(nbytes)
            return self._free_at + self.line.round_trip_seconds / 2


class Held:
    """The bytes of one connection on their way, at most so many."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._nbytes = 0
        self._changed = threading.Condition()

    def await_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes < self._max_bytes)

    def put(self, arrives_at: float, piece: bytes) -> None:
        with self._changed:
            self._pieces.append((arrives_at, piece))
            self._nbytes += len(piece)
            self._changed.notify_all()

    def first(self) -> tuple[float, bytes]:
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            return self._pieces[0]

    def remove_first(self) -> None:
        with self._changed:
            self._nbytes -= len(self._pieces.popleft()[1])
            self._changed.notify_all()


def carry(source: socket.socket, sink: socket.socket, direction: Direction, begin_at: float) -> None:
    """Pass bytes on from `begin_at` until the source ends, then end the sink. A lost end closes both."""
    held = Held(direction.line.held_bytes)
    writer = threading.Thread(target=_deliver, args=(held, sink, source), daemon=True)
    writer.start()
    sleep(max(0.0, begin_at - monotonic()))
    piece = b"begin"
    while piece:
        direction.await_turn()
        held.await_room()
        try:
            piece = source.recv(direction.line.piece_bytes)
        except OSError:
            piece = b""
        held.put(direction.enter(len(piece)), piece)
    writer.join()


def _deliver(held: Held, sink: socket.socket, source: socket.socket) -> None:
    piece = b"begin"
    while piece:
        arrives_at, piece = held.first()
        sleep(max(0.0, arrives_at - monotonic()))
        try:
            if piece:
                sink.sendall(piece)
            else:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            # The reader must see an end too, and needs no room for what it still reads.
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)
        held.remove_first()


class Relay:
    """One client's line to one port."""

    def __init__(self, line: Line, target: int) -> None:
        self.up, self.down = Direction(line), Direction(line)
        self._line = line
        self._target = target
        self._listener = self._small(socket.socket())
        self._listener.bind((HOST, 0))
        self._listener.listen(128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _small(self, end: socket.socket) -> socket.socket:
        """Limit what the kernel buffers, before the socket is connected; connections inherit it from a listener."""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(1 << 16, 2 * self._line.piece_bytes))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        accepted_at = monotonic()
        with client, self._small(socket.socket()) as server:
            try:
                server.connect((HOST, self._target))
            except OSError:
                # The client sees a connection that ends, and tries again.
                return
            back = threading.Thread(target=carry, args=(server, client, self.down, accepted_at), daemon=True)
            back.start()
            carry(client, server, self.up, accepted_at + self._line.round_trip_seconds)
            back.join()


def main(megabits_per_second: float, round_trip_seconds: float) -> None:
    line = Line(megabits_per_second, round_trip_seconds)
    relays: list[Relay] = []
    for command in sys.stdin:
        name, *values = command.split()
        if name == "open":
            relays.append(Relay(line, int(values[0])))
            print(relays[-1].port, flush=True)
        else:
            print(sum(r.up.moved for r in relays), sum(r.down.moved for r in relays), flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
