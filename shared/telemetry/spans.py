"""Spans of OpenTelemetry: which stretch of work took how long, in which process, and what it was for.

Only where the standard environment variables name a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`); elsewhere nothing of
OpenTelemetry is imported and a span is nothing at all. Spans carry ids, numbers and codes that we chose. The texts of
errors never go into them, since what went wrong may quote data.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import structlog

from tessera.shared.telemetry.trace_ids import Attributes, Kind

NONE: Attributes = {}
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
GOODBYE_SECONDS = 2.0


class Recorder(Protocol):
    """What makes spans and sends them off: `shared.telemetry.otel`."""

    def span(
        self, name: str, kind: Kind, parent: str | None, attributes: Attributes
    ) -> AbstractContextManager[None]: ...
    def past(self, name: str, parent: str, began_at: float, ended_at: float, attributes: Attributes) -> None: ...
    def root(self, name: str, itself: str, began_at: float, ended_at: float, attributes: Attributes) -> None: ...
    def present(self) -> str | None: ...
    def tell(self, name: str | None, attributes: Attributes) -> None: ...
    def link(self, to: str) -> None: ...
    def end(self, seconds: float) -> None: ...


_recorder: Recorder | None = None
_nothing = nullcontext()


def begin(service: str) -> None:
    """To be called once, by the program that this process runs. `service` is its name if the environment has none."""
    global _recorder  # noqa: PLW0603 (a process has one environment)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if _recorder or disabled or not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        # An extra, and slow to import.
        _recorder = importlib.import_module("tessera.shared.telemetry.otel").Otel(service)
    except ModuleNotFoundError as fault:
        structlog.get_logger().warning("spans.not_installed", missing=fault.name, remedy="install tessera[otel]")


def end() -> None:
    """Send off what is left, for two seconds at most."""
    global _recorder  # noqa: PLW0603 (the same)
    if _recorder:
        _recorder.end(GOODBYE_SECONDS)
        _recorder = None


def on() -> bool:
    """Return whether spans are made at all, for who would have to look something up for one."""
    return _recorder is not None


def span(
    name: str, *, kind: Kind = "internal", parent: str | None = None, attributes: Attributes = NONE
) -> AbstractContextManager[None]:
    """Within it, something is done. Its parent is the span that a `traceparent` names, or else the present one."""
    return _recorder.span(name, kind, parent, attributes) if _recorder else _nothing


def past(name: str, *, parent: str, began_at: float, ended_at: float, attributes: Attributes = NONE) -> None:
    """What is over, in seconds since 1970."""
    if _recorder:
        _recorder.past(name, parent, began_at, ended_at, attributes)


def root(name: str, *, itself: str, began_at: float, ended_at: float, attributes: Attributes = NONE) -> None:
    """What is over and has no parent, under the ids of a `traceparent` that others have named as theirs."""
    if _recorder:
        _recorder.root(name, itself, began_at, ended_at, attributes)


def present() -> str | None:
    """Return the `traceparent` of the present span."""
    return _recorder.present() if _recorder else None


def tell(name: str | None = None, attributes: Attributes = NONE) -> None:
    """Add to the present span, or call it by a better name."""
    if _recorder:
        _recorder.tell(name, attributes)


def link(to: str) -> None:
    """Say that the present span led to another trace."""
    if _recorder:
        _recorder.link(to)
