"""Structured logs: lines for people on a terminal, JSON elsewhere, on a stream that may fail."""

from contextlib import suppress
from io import StringIO
from typing import Any, TextIO

import structlog

from tessera.shared.sanitize import fit_to_show


class Lines(structlog.WriteLogger):
    """Writes each line whole, since several processes share a log. One that cannot be written is lost: that the disk
    under the log is full is no reason to drop a request, or the work of an hour."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    # The base class binds each of these to its own `msg`.
    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def _traceback(stream: TextIO, fault: Any) -> None:
    """Write a traceback; the message of the error may be another's text."""
    written = StringIO()
    structlog.dev.plain_traceback(written, fault)
    stream.write(fit_to_show(written.getvalue()))


def configure(stream: TextIO, *, console: bool, level: int = 0) -> None:
    """Write this process's logs to `stream`, those of `level` and above."""
    # The default traceback shows local values, tokens among them, and takes seconds to draw.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *([plain] if console else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: Lines(stream),
    )
