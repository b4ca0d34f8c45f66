"""Exit codes of the commands at a site, and the `--config` option that they share."""

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tessera.shared.problems import Problem
from tessera.shared.terminal.output import complain

BAD_SETTINGS = 2
NOT_ADMITTED = 3
DEVICE_FAILED = 4
DISK_FULL = 5
INTERRUPTED = 130

Errors = Mapping[int, tuple[type[Exception], ...]]
"""Exit codes, and the errors that end a command with each."""

ConfigFile = Annotated[Path, typer.Option("--config", help="The worker's settings, as TOML.")]


def fail(sentence: str, code: int) -> NoReturn:
    """Report an error on stderr, and exit with a code."""
    complain(sentence)
    raise typer.Exit(code)


def end() -> None:
    """End the process now. Torch is taken apart for seconds of CPU, in which a supervisor may lose its patience.

    Functions that are registered for the end run, such as ending other processes, and all files are closed.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 (the module has no other way)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def exits(errors: Errors) -> Iterator[None]:
    """Report one of these errors in one line, and exit with its code."""
    try:
        yield
    except tuple(kind for kinds in errors.values() for kind in kinds) as fault:
        code = next(code for code, kinds in errors.items() if isinstance(fault, kinds))
        sentence = f"{fault.detail}. {fault.advice}" if isinstance(fault, Problem) else str(fault)
        fail(" ".join(sentence.split()), code)
