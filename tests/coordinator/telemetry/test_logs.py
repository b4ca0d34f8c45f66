"""What is logged where nobody sits at a terminal: lines of JSON, our own and the libraries'."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import structlog

from tessera.shared.telemetry.logging import configure

SCRIPT = """
import logging, structlog
from tessera.coordinator.telemetry import logging as logs
logs.configure()
structlog.contextvars.bind_contextvars(trace="abc")
logging.getLogger("uvicorn.error").warning("Invalid %s request", "HTTP")
logging.getLogger("uvicorn.error").info("not of interest")
try:
    raise ValueError("a fault")
except ValueError:
    logging.getLogger("somebody").exception("it failed")
structlog.get_logger().info("ours")
"""


def test_what_libraries_log_is_json_with_the_trace_too() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stderr
    warned, failed, ours = map(json.loads, told.splitlines())
    assert (warned["event"], warned["level"], warned["logger"]) == (
        "Invalid HTTP request",
        "warning",
        "uvicorn.error",
    )
    assert (failed["event"], failed["level"]) == ("it failed", "error")
    assert "ValueError: a fault" in failed["exception"]
    assert ours["event"] == "ours"
    assert {line["trace"] for line in (warned, failed, ours)} == {"abc"}


def test_a_traceback_on_a_terminal_has_no_escapes_of_others() -> None:
    stream = StringIO()
    before = structlog.get_config()
    try:
        configure(stream, console=True)
        structlog.get_logger().error("failed", exc_info=ValueError("\x1b]0;title\x07 \u202e"))
    finally:
        structlog.configure(**before)
    # The renderer's own colours stay.
    assert "ValueError: \ufffd]0;title\ufffd \ufffd" in stream.getvalue()


def test_a_log_on_a_full_disk_loses_lines_and_nothing_else() -> None:
    script = SCRIPT + "print('went on')"
    with Path("/dev/full").open("w") as full:
        told = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, check=False)
    assert told.stdout == b"went on\n"
