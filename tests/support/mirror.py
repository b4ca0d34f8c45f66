"""A web server that serves a folder, as a mirror of external bases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serving(folder: Path, fails_at: int = 0) -> Iterator[tuple[str, list[str]]]:
    """The address of a mirror that serves a folder, and the paths that it is asked for. One request may fail."""
    asked: list[str] = []

    class Mirror(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) == fails_at:
                self.send_error(503)
            else:
                super().do_GET()

        def log_message(self, *args: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Mirror, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
