"""What a test run leaves behind: processes that outlive it, and its folders of temporary files."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

RUN = "TESSERA_TEST_RUN"
"""Environment variable with the name of the run, which all of its processes inherit."""

SECONDS = 30.0
"""Time in which processes end that were asked to."""


def name_run() -> None:
    """Name the run, unless the process that started this one did."""
    os.environ.setdefault(RUN, uuid.uuid4().hex[:12])


def temporary_folder(what: str) -> Path:
    """Create a folder that has to be gone at the run's end."""
    name_run()
    return Path(tempfile.mkdtemp(prefix=f"tessera-{os.environ[RUN]}-{what}-"))


def leftovers() -> list[str]:
    """Return the run's processes that go on and that this one did not start, and its folders."""
    until = time.monotonic() + SECONDS
    while (found := _processes()) and time.monotonic() < until:
        time.sleep(0.2)
    return [*found, *map(str, Path(tempfile.gettempdir()).glob(f"tessera-{os.environ[RUN]}-*"))]


def _processes() -> list[str]:
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in own and process.environ().get(RUN) == os.environ[RUN]:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
    return found
