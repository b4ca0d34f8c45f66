"""The conductor as a child of the process that serves: started again when it dies, gone when its parent is."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
GOODBYE_SECONDS = 3.0

SILENT_SECONDS = 60.0
"""Time after a missed tick at which a conductor counts as stopped."""

COMMAND = (sys.executable, "-m", "tessera.coordinator", "conduct", "--attached")


class ChildConductor:
    """Runs between `start` and `stop`. It touches `heartbeat` at each look at the runs."""

    def __init__(self, heartbeat: Path, tick_seconds: float) -> None:
        self._heartbeat = heartbeat
        self._silent_seconds = SILENT_SECONDS + tick_seconds
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._supervise, name="supervision", daemon=True)

    def start(self) -> None:
        # Not when it starts again: one that dies at each start does not conduct.
        with suppress(OSError):
            self._heartbeat.touch()
        self._begin()
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            child = self._child
        if child is None:
            return
        child.terminate()
        try:
            child.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            # The next child does interrupted work again.
            child.kill()
            child.wait()

    def is_alive(self) -> bool:
        """Return True if the child has looked at the runs lately, or is starting."""
        try:
            return time.time() - self._heartbeat.stat().st_mtime < self._silent_seconds
        except OSError:
            return False

    def _begin(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                # The pipe is never written to: its end tells the child of its parent's, however that came about.
                # A group of its own, so that Ctrl-C in a terminal reaches it by way of `stop` alone.
                self._child = subprocess.Popen(  # noqa: S603 (our own program)
                    COMMAND, stdin=subprocess.PIPE, process_group=0
                )

    def _supervise(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set() and self._child:
            began = time.monotonic()
            code = self._child.wait()
            if self._stopping.is_set():
                return
            # One that dies at once is not started again and again without a break.
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - began > MAX_PAUSE_SECONDS else 2 * pause
            pause = min(pause, MAX_PAUSE_SECONDS)
            log.error("conductor.died", code=code, again_in_seconds=pause)
            self._stopping.wait(pause)
            if self._child.stdin:
                self._child.stdin.close()
            self._begin_again()

    def _begin_again(self) -> None:
        while True:
            try:
                return self._begin()
            except OSError as fault:
                # The machine has no memory, or no process number, left at the moment.
                log.warning("conductor.not_started", detail=str(fault), again_in_seconds=MAX_PAUSE_SECONDS)
                self._stopping.wait(MAX_PAUSE_SECONDS)


def end_with_parent() -> None:
    """End this process when its standard input does."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
