"""Spans by OpenTelemetry's API, which does nothing until `begin` finds a collector in the environment.

Spans carry ids, numbers and codes that we chose. The texts of errors never go into them, since they may quote data.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes

from tessera.shared.problems import Problem
from tessera.shared.telemetry.trace_ids import HEADER, HEADERS, OWN_IDS, context_of, ids_in
from tessera.shared.version import VERSION, install_line

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
GOODBYE_SECONDS = 2.0

_provider: TracerProvider | None = None
_tracer: trace.Tracer = trace.NoOpTracer()


def begin(service: str) -> None:
    """Start to send spans if the environment names a collector. The program that a process runs calls this once;
    `service` is its name if the environment gives none."""
    global _provider, _tracer  # noqa: PLW0603 (a process has one environment)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if _provider or disabled or not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        # An extra, and slow to import.
        _provider = importlib.import_module("tessera.shared.telemetry.otel").provider(service)
    except ModuleNotFoundError as fault:
        structlog.get_logger().warning("spans.not_installed", missing=fault.name, remedy=install_line("otel"))
    else:
        _tracer = _provider.get_tracer("tessera", VERSION)


def end() -> None:
    """Send the last spans, for two seconds at most."""
    global _provider, _tracer
    if _provider:
        # The library's own wait is longer where no collector answers.
        last = threading.Thread(target=_provider.shutdown, name="spans", daemon=True)
        last.start()
        last.join(GOODBYE_SECONDS)
        _provider, _tracer = None, trace.NoOpTracer()


def on() -> bool:
    """Return True if spans are sent, for callers that would have to look something up for one."""
    return _provider is not None


@contextmanager
def span(
    name: str, *, kind: SpanKind = SpanKind.INTERNAL, parent: str | None = None, attributes: Attributes = None
) -> Iterator[None]:
    """Record the block as a span. Its parent is the span that a `traceparent` names, or else the present one."""
    within = context_of(parent) if parent else None
    # By default both would send the error's text.
    with _tracer.start_as_current_span(
        name, within, kind, attributes, record_exception=False, set_status_on_exception=False
    ) as made:
        try:
            yield
        except Exception as fault:
            made.set_status(Status(StatusCode.ERROR))
            made.set_attribute("error.type", fault.code if isinstance(fault, Problem) else type(fault).__name__)
            raise


def past(
    name: str, of: str, began_at: float, ended_at: float, attributes: Attributes, *, is_parent: bool = True
) -> None:
    """Record a span that is over, in seconds since 1970. A `traceparent` names its parent, or, without `is_parent`,
    the span itself, which others named as theirs and which has no parent."""
    within = context_of(of) if is_parent else context.set_value(OWN_IDS, ids_in(of), context.Context())
    token = context.attach(within)
    try:
        made = _tracer.start_span(name, within, attributes=attributes, start_time=round(began_at * 1e9))
        made.end(round(ended_at * 1e9))
    finally:
        context.detach(token)


def present() -> str | None:
    """Return the `traceparent` of the present span."""
    carrier: dict[str, str] = {}
    HEADERS.inject(carrier)
    return carrier.get(HEADER)
