"""A line between workers and a coordinator that can be slow, cut, dead or noisy."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from random import Random

PIECE_BYTES = 1 << 16


class Line:
    """Passes TCP on to one port, as well as it is told to."""

    def __init__(self, port: int, dice: Random) -> None:
        self.delay_seconds = 0.0
        """How long each piece takes."""
        self.dead = False
        """Whether who calls is not answered."""
        self.refused = 0
        """How many callers were not answered."""
        self.noisy = 0
        """In how many of the next pieces one byte is changed. Only in those that fill the buffer, which are of blobs
        and updates: in a short message of JSON a changed byte may be another number, which TLS is there to notice."""
        self.spoilt = 0
        self._target = port
        self._dice = dice
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks all connections that there are."""
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self.dead:
                        self.refused += 1
                        raise ConnectionError
                    server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                    server.settimeout(None)
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._open |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                sink.sendall(self._heard(piece))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        with self._lock:
            self._open -= {source, sink}

    def _heard(self, piece: bytes) -> bytes:
        with self._lock:
            if not self.noisy or len(piece) < PIECE_BYTES:
                return piece
            self.noisy -= 1
            self.spoilt += 1
            changed = bytearray(piece)
            changed[self._dice.randrange(len(piece))] ^= 1 << self._dice.randrange(8)
            return bytes(changed)
