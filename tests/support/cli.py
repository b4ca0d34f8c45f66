"""`tessera`, in this process or in one of its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import structlog
from typer.testing import CliRunner

from tessera.shared.cli import main
from tests.support import zygote

NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""

# Made anew for each line, a command takes longer than most of them do.
main.get_command = cache(main.get_command)

HEAVY = (
    "torch", "transformers", "datasets", "pandas", "sklearn", "scipy", "huggingface_hub", "matplotlib", "sqlalchemy",
    "alembic", "obstore", "fastapi", "uvicorn",
)  # fmt: skip
"""Modules that an agent never imports, and a command only if it needs them."""

COMMAND = (sys.executable, "-m", "tessera.shared.cli")


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with none of Tessera's own settings but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**kept, "COLUMNS": "200", "NO_COLOR": "1", **settings}


def tessera(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in this process: to start one and import what it needs takes a second and more.

    `settings` are environment variables, and Tessera's others are unset. For commands that serve, load methods or
    set this process up in another way, `process`.
    """
    unset = dict.fromkeys((name for name in os.environ if name.startswith("TESSERA_")), None)
    wanted = {**unset, "COLUMNS": "200", "NO_COLOR": "1", **settings}
    with _logs_restored():
        done = CliRunner().invoke(main.app, arguments, env=wanted, prog_name="tessera")
    fault = done.exception
    told = "" if fault is None or isinstance(fault, SystemExit) else "".join(traceback.format_exception(fault))
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr + told)


@contextmanager
def _logs_restored() -> Iterator[None]:
    """A command may direct this process's logs to its own standard error, which is closed when it ends."""
    settings, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        structlog.configure(**settings)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def process(
    *arguments: str, command: Sequence[str] = COMMAND, seconds: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own, within so many seconds, which imports for itself what it needs."""
    return subprocess.run(
        [*command, *arguments],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def forked(
    *arguments: str, module: str = "tessera.shared.cli", seconds: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """The same as a process that has imported already what its module needs: see `zygote`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, open(os.devnull) as nothing:  # noqa: PTH123 (a device)
        streams = {"reads": nothing.fileno(), "writes": out.fileno(), "errors": errors.fileno()}
        code = zygote.start(module, arguments, environment(**settings), **streams).wait(seconds)
        for stream in (out, errors):
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read().decode(), errors.read().decode())
