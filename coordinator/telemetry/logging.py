"""Structured logs on standard error, also of libraries."""

import logging
import sys

import structlog

from tessera.shared.telemetry.logging import configure as configure_structlog


class ForwardingHandler(logging.Handler):
    """Handler that writes log records of libraries in our format."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def configure() -> None:
    configure_structlog(sys.stderr, console=sys.stderr.isatty(), level=logging.INFO)
    logging.basicConfig(handlers=[ForwardingHandler(logging.WARNING)], force=True)
