"""Structured logs: for people on a terminal, as JSON elsewhere. Both go to standard error."""

from __future__ import annotations

import sys

import structlog


def configure() -> None:
    people = sys.stderr.isatty()
    # The default traceback shows local values, tokens among them, and takes seconds to draw.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    renderer = plain if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([] if people else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
