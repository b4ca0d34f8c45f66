"""A wire between a worker and its coordinator that remembers what went over it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Self
from urllib.parse import urlsplit


class Tap(ThreadingTCPServer):
    """Passes every byte on. `up` has what the worker sent, headers and all, `down` how many bytes it got."""

    daemon_threads = False

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), Wire)
        ahead = urlsplit(url)
        self.ahead = (ahead.hostname, ahead.port)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.up = bytearray()
        self.down = 0
        self.open: set[socket.socket] = set()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.shutdown()
        for connection in tuple(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class Wire(BaseRequestHandler):
    """One connection."""

    server: Tap
    request: socket.socket

    def handle(self) -> None:
        self.server.open.add(self.request)
        with socket.create_connection(self.server.ahead) as far:
            back = threading.Thread(target=self._down, args=(far,))
            back.start()
            while data := self.request.recv(1 << 16):
                self.server.up += data
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)
            back.join()
        self.server.open.discard(self.request)

    def _down(self, far: socket.socket) -> None:
        while data := far.recv(1 << 16):
            self.server.down += len(data)
            self.request.sendall(data)
