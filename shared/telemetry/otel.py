"""Spans by OpenTelemetry's SDK, sent as OTLP over HTTP. All about it is set by its own environment variables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tessera.shared.problems import Problem
from tessera.shared.telemetry.trace_ids import HEADER, Attributes, Kind
from tessera.shared.version import VERSION

KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
NAMELESS = "unknown_service"

_headers = TraceContextTextMapPropagator()


class Ids(RandomIdGenerator):
    """Random ids, or for one span those that were said."""

    def __init__(self) -> None:
        self._said = threading.local()

    @contextmanager
    def being(self, of: trace.SpanContext) -> Iterator[None]:
        """Within it, this thread makes one span that is this one."""
        self._said.ids = of
        yield
        self._said.ids = None

    def generate_trace_id(self) -> int:
        said: trace.SpanContext | None = getattr(self._said, "ids", None)
        return said.trace_id if said else super().generate_trace_id()

    def generate_span_id(self) -> int:
        said: trace.SpanContext | None = getattr(self._said, "ids", None)
        return said.span_id if said else super().generate_span_id()


class Otel:
    """A `shared.telemetry.spans.Recorder`."""

    def __init__(self, service: str) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith(NAMELESS):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        resource = Resource({SERVICE_VERSION: VERSION}).merge(resource)
        self._ids = Ids()
        # What is left at the end is sent by `end`, which waits no longer than it is told to.
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("tessera", VERSION)

    @contextmanager
    def span(self, name: str, kind: Kind, parent: str | None, attributes: Attributes) -> Iterator[None]:
        context = _context(parent) if parent else None
        with self._tracer.start_as_current_span(
            name,
            context,
            KINDS[kind],
            attributes,
            # Both would send the error's text.
            record_exception=False,
            set_status_on_exception=False,
        ) as made:
            try:
                yield
            except Exception as fault:
                made.set_status(Status(StatusCode.ERROR))
                made.set_attribute("error.type", fault.code if isinstance(fault, Problem) else type(fault).__name__)
                raise

    def past(self, name: str, parent: str, began_at: float, ended_at: float, attributes: Attributes) -> None:
        self._over(name, _context(parent), began_at, ended_at, attributes)

    def root(self, name: str, itself: str, began_at: float, ended_at: float, attributes: Attributes) -> None:
        with self._ids.being(_told_of(itself)):
            self._over(name, Context(), began_at, ended_at, attributes)

    def _over(self, name: str, context: Context, began_at: float, ended_at: float, attributes: Attributes) -> None:
        made = self._tracer.start_span(name, context, attributes=attributes, start_time=_nanoseconds(began_at))
        made.end(_nanoseconds(ended_at))

    def present(self) -> str | None:
        carrier: dict[str, str] = {}
        _headers.inject(carrier)
        return carrier.get(HEADER)

    def tell(self, name: str | None, attributes: Attributes) -> None:
        made = trace.get_current_span()
        made.set_attributes(dict(attributes))
        if name is not None:
            made.update_name(name)

    def link(self, to: str) -> None:
        trace.get_current_span().add_link(_told_of(to))

    def end(self, seconds: float) -> None:
        # The library's own wait is longer where nobody listens.
        last = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        last.start()
        last.join(seconds)


def _context(header: str) -> Context:
    """Return a context in which the span that a header names is the present one, and nothing else is."""
    return _headers.extract({HEADER: header}, Context())


def _told_of(header: str) -> trace.SpanContext:
    return trace.get_current_span(_context(header)).get_span_context()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
