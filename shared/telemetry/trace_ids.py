"""Trace ids: one name for all work done for one purpose, in any process (W3C Trace Context).

A round has a trace that follows from its run and its number, so that the conductor, workers and the readers of their
logs agree on it without exchanging it.
"""

import hashlib

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER = "traceparent"
HEADERS = TraceContextTextMapPropagator()
OWN_IDS = "tessera.own_ids"
"""The key in OpenTelemetry's context of the ids that the next span has, in place of random ones."""


def traceparent_of(run: str, number: int) -> str:
    """Return the header of work for a round, or for measuring the version that it made. Its parent is the round's
    span."""
    digest = hashlib.sha256(f"{run}/{number}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def trace_of(run: str, number: int) -> str:
    """Return the trace of a round."""
    return traceparent_of(run, number)[3:35]


def context_of(header: str) -> Context:
    """Return a context in which the span that a header names is the present one, and that holds nothing else."""
    return HEADERS.extract({HEADER: header}, Context())


def ids_in(header: str) -> SpanContext:
    """Return the ids in a header; invalid ones if it has none."""
    return get_current_span(context_of(header)).get_span_context()


def trace_in(header: str) -> str | None:
    """Return the trace id of a header; None if it has no valid one."""
    ids = ids_in(header)
    return format_trace_id(ids.trace_id) if ids.is_valid else None
