"""Real processes on this machine: started in groups of their own, watched, and stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import psutil

HOST = "127.0.0.1"
GRACE_SECONDS = 10.0
CALM = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""One thread each, since several share the cores, and no request to a hub."""


class Processes:
    """Started processes. The first one is stopped last, so that the others can still sign off."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], settings: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TESSERA_")}
        with (self._logs / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env={**kept, **CALM, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def check(self) -> None:
        """Raise RuntimeError with the end of its log if any process has ended."""
        for name, process in self._running.items():
            if (code := process.poll()) is not None:
                log = (self._logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"{name} ended with exit code {code}: {log[-2000:]}")

    def stop(self) -> None:
        first, *others = self._running.values() or (None,)
        for group in (others, [first]):
            some = [process for process in group if process]
            for number in (signal.SIGTERM, signal.SIGKILL):
                for process in some:
                    if process.poll() is None:
                        # It may end between the look and the signal.
                        with suppress(ProcessLookupError):
                            os.killpg(process.pid, number)
                give_up_at = monotonic() + GRACE_SECONDS
                for process in some:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, give_up_at - monotonic()))
        self._running.clear()


def await_true(condition: Callable[[], object], seconds: float, what: str, every_seconds: float = 0.05) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    give_up_at = monotonic() + seconds
    while not condition():
        if monotonic() > give_up_at:
            raise TimeoutError(f"timed out after {seconds:.0f} s: {what}")
        sleep(every_seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _with_descendants(pids: Iterable[int]) -> Iterable[psutil.Process]:
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            yield process
            yield from process.children(recursive=True)


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes and their descendants, with those that ended and were waited for."""
    total = 0.0
    for process in _with_descendants(pids):
        with suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


class PeakMemory:
    """The most bytes that groups of processes, with their descendants, hold at one time. Used with `with`."""

    def __init__(self, groups: Mapping[str, Sequence[int]], every_seconds: float = 0.05) -> None:
        self._groups = groups
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peaks = dict.fromkeys(groups, 0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            for name, pids in self._groups.items():
                held = 0
                for process in _with_descendants(pids):
                    with suppress(psutil.Error):
                        held += process.memory_info().rss
                self.peaks[name] = max(self.peaks[name], held)
            if self._ended.wait(self._every_seconds):
                return
