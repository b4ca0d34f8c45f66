"""A real HTTP server that answers what a test tells it to, one answer after the other."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.support.web_server import Quiet, served


@dataclass
class Answer:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    breaks_after: int | None = None
    """Bytes of the body after which the connection breaks."""


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def answering(*answers: Answer) -> Iterator[tuple[str, list[Asked]]]:
    """The server's URL, and what it was asked. The last answer is repeated."""
    asked: list[Asked] = []
    with answering_by(lambda _: answers[min(len(asked), len(answers)) - 1], asked) as url:
        yield url, asked


@contextmanager
def answering_by(
    choose: Callable[[Asked], Answer], asked: list[Asked], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """The URL of a server whose answers follow what it is asked, which is noted."""

    class Scripted(Quiet, BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(Asked(self.command, self.path, dict(self.headers), body))
            answer = choose(asked[-1])
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body[: answer.breaks_after])
            self.close_connection = answer.breaks_after is not None

        do_GET = do_POST = do_PATCH = do_HEAD = do_DELETE = answer  # noqa: N815 (as http.server calls them)

    with served(Scripted, tls) as url:
        yield url
