"""What takes in spans, as OTLP over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.web_server import Quiet, served


@dataclass(frozen=True)
class Span:
    """As it came over the wire; ids in hexadecimal digits, `parent` empty for none."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    failed: bool
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """The traces that it is linked to."""
    seconds: float


class Receiver:
    """All spans that were sent to it so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.raw = b""

    def take(self, body: bytes) -> None:
        self.raw += body
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for group in request.resource_spans:
            service = next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
            self.spans += [_read(service, span) for scope in group.scope_spans for span in scope.spans]


def _read(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        failed=span.status.code == 2,
        attributes={a.key: a.value.string_value or a.value.int_value for a in span.attributes},
        links=tuple(link.trace_id.hex() for link in span.links),
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A server on a free port of loopback."""

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with served(Handler) as url:
        receiver = Receiver(url)  # known to the handler
        yield receiver
