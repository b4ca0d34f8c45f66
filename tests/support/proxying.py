"""A forward proxy, as a hospital has one: CONNECT for TLS, whole URLs for plain HTTP."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.support.web_server import Quiet, served


@contextmanager
def proxying() -> Iterator[tuple[str, list[str]]]:
    """Its URL, and what it was asked for."""
    asked: list[str] = []

    class Proxy(Quiet, BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(f"CONNECT {self.path}")
            host, _, port = self.path.partition(":")
            with socket.create_connection((host, int(port))) as far:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=poured, args=(far, self.connection))
                back.start()
                poured(self.connection, far)
                back.join()
            self.close_connection = True

        def forward(self) -> None:
            asked.append(f"{self.command} {self.path}")
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            far = http.client.HTTPConnection(url.netloc)
            far.request(self.command, url.path, body, dict(self.headers))
            answer = far.getresponse()
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            far.close()

        do_GET = do_POST = forward  # noqa: N815 (as http.server calls them)

    with served(Proxy) as url:
        yield url, asked


def poured(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one to the other until either ends."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass
