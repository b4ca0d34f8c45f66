"""Real processes, each with its own process group and log file; none survives the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, where this is one."""

GRACE_SECONDS = 10.0

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))

# One thread each: five processes share a laptop's cores. Nothing here is to be looked up on a hub.
CALM = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Died(Exception):
    """A process ended unexpectedly."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        super().__init__(f"{name} ended with exit code {code}")
        self.log = log

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with these settings, and without its own TESSERA_ variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**kept, **CALM, **settings}


def tessera(*arguments: str) -> list[str]:
    """Return a `tessera` command line for this interpreter."""
    return [sys.executable, "-m", "tessera.shared.cli", *arguments]


def end_by_interrupt() -> None:
    """Let SIGTERM and a closed terminal end this process as ^C does."""
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer interrupts to the end of the block, and then raise KeyboardInterrupt if there were any.

    A blocked signal would not do, since processes inherit that.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


class Processes:
    """The started processes, which are stopped in reverse order. They run the code of the checkout `root`, if
    given, and otherwise that of this process."""

    def __init__(self, logs: Path, root: Path | None = None) -> None:
        self._logs = logs
        self._root = root or logs
        self._code = {"PYTHONPATH": str(root)} if root else {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process with these settings."""
        return environment({**self._code, **settings})

    def start(self, name: str, command: Sequence[str], settings: Mapping[str, str]) -> None:
        # An interrupt between a process's start and its entry here would leave it behind.
        with uninterrupted(), self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                cwd=self._root,
                env=self.environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own, so that the terminal's ^C reaches this process alone and it stops them in order.
                start_new_session=True,
            )

    def finish(self, name: str) -> None:
        """Wait until a process has ended. Raise Died if it failed."""
        code = self._running[name].wait()
        # Only now: should the wait be interrupted, it is still there to be stopped.
        del self._running[name]
        if code:
            raise Died(name, code, self._log(name))

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def kill(self, name: str) -> None:
        """Kill a process and its children by SIGKILL."""
        process = self._running.pop(name)
        _signal(process, signal.SIGKILL)
        process.wait()

    def check(self) -> None:
        """Raise Died if any process has ended."""
        for name, process in self._running.items():
            if (code := process.poll()) is not None:
                raise Died(name, code, self._log(name))

    def stop(self) -> None:
        """End all processes, the first one last so that the others can still sign off."""
        first, *others = self._running.values() or (None,)
        with uninterrupted():
            for group in (others, [first]):
                _end([process for process in group if process])
            self._running.clear()

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all, then SIGKILL to those that have not ended in time."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    give_up_at = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        # It may end between the look and the signal.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
