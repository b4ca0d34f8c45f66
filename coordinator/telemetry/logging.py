"""Structured logs: for people on a terminal, as JSON elsewhere. Both go to standard error."""

from __future__ import annotations

import logging
import sys

import structlog

from tessera.shared.telemetry.log_lines import Lines


class Forwarding(logging.Handler):
    """What libraries log, as one of our lines."""

    def emit(self, record: logging.LogRecord) -> None:
        told = structlog.get_logger()
        told.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


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
        logger_factory=lambda *_: Lines(sys.stderr),
    )
    logging.basicConfig(handlers=[Forwarding(logging.WARNING)], force=True)
