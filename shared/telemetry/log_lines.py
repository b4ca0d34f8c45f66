"""Log lines, one after the other, on a stream that may fail."""

from __future__ import annotations

from contextlib import suppress

from structlog import PrintLogger


class Lines(PrintLogger):
    """Prints each line; one that cannot be written is lost. That the disk under the log is full is no reason to drop
    a request, or the work of an hour."""

    def msg(self, message: str) -> None:
        with suppress(OSError):
            super().msg(message)

    # The base class binds each of these to its own `msg`.
    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg
