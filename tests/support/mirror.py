"""A web server that serves a folder, as a mirror of external bases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from tests.support.web_server import Quiet, served


@contextmanager
def serving(folder: Path, fails_at: int = 0) -> Iterator[tuple[str, list[str]]]:
    """The address of a mirror that serves a folder, and the paths that it is asked for. One request may fail."""
    asked: list[str] = []

    class Mirror(Quiet, SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) == fails_at:
                self.send_error(503)
            else:
                super().do_GET()

    with served(partial(Mirror, directory=str(folder))) as url:
        yield url, asked
