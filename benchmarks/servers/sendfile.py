"""The limit: HTTP by hand, a thread for each connection. A file goes out by sendfile(2) and never enters the process;
what comes in is received into one buffer, hashed and written.

`python -m benchmarks.servers.sendfile PORT`, with TESSERA_BENCH_FILE as in `app`.
"""

from __future__ import annotations

import hashlib
import os
import socketserver
import sys
import tempfile
from pathlib import Path

from benchmarks.servers.app import STREAM_BYTES


class Handler(socketserver.StreamRequestHandler):
    wbufsize = 0

    def handle(self) -> None:
        while line := self.rfile.readline():
            length = 0
            while (header := self.rfile.readline().strip()) not in (b"", b"\r\n"):
                name, _, value = header.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            path = Path(os.environ["TESSERA_BENCH_FILE"])
            if line.startswith(b"GET"):
                self._send(path)
            else:
                self._receive(path.parent, length)

    def _send(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
            self.connection.sendfile(file)

    def _receive(self, folder: Path, left: int) -> None:
        found, buffer = hashlib.sha256(), memoryview(bytearray(STREAM_BYTES))
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while left and (count := self.rfile.readinto(buffer[: min(left, STREAM_BYTES)])):
                left -= count
                found.update(buffer[:count])
                file.write(buffer[:count])
        body = found.hexdigest()
        self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
