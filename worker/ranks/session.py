"""A running rank group, as the agent sees it: its launcher, its folder and its connections."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from uuid import uuid4

from tessera.worker.ranks import serialization
from tessera.worker.ranks.launcher import END
from tessera.worker.ranks.messages import (
    RESULT_FILE,
    Call,
    Ended,
    Progressed,
    Reply,
    Start,
    StopTask,
    TaskAt,
    receive,
    send,
)
from tessera.worker.ranks.serialization import UNEXPLAINED
from tessera.worker.task.errors import TaskFailure
from tessera.worker.training.progress import Check

LOOK_SECONDS = 0.2
"""Time between two looks whether the task is still wanted."""
STOP_SECONDS = 15.0
"""Time in which the ranks have to reach the end of a step, once the task is no longer wanted."""
END_SECONDS = 10.0
"""Time for the launcher to end its ranks before it is killed."""


class RanksEnded(TaskFailure):
    """The end of a rank's process within a task."""


class Session:
    """The ranks of a group, from their start until `close`. One thread uses it, and must outlive it: the kernel ends
    the launcher with the thread that started it."""

    def __init__(self, start: Start, folder: Path) -> None:
        """Start the ranks, with a new folder in `folder`. Raises RanksEnded."""
        self.folder = folder / uuid4().hex
        self.folder.mkdir(parents=True, mode=0o700)
        self._devices = start.devices
        self._tasks = 0
        self._unwanted: BaseException | None = None
        """The exception by which the present task is no longer wanted."""
        pairs = [Pipe() for _ in start.devices]
        self._connections = [own for own, _ in pairs]
        # No other process can connect to a rank or to the agent.
        self._launcher = self._launched([theirs for _, theirs in pairs], start.threads)
        threading.Thread(target=self._remove_folder, daemon=True).start()
        for connection in self._connections:
            self._send(connection, start)

    def _launched(self, connections: Sequence[Connection], threads: int) -> "subprocess.Popen[bytes]":
        """Start the launcher, which passes each rank its connection, and close these here."""
        passed = [each.fileno() for each in connections]
        arguments = [str(os.getpid()), str(self.folder), *map(str, passed)]
        try:
            return subprocess.Popen(  # noqa: S603  (our own module)
                [sys.executable, "-m", "tessera.worker.ranks.launcher", *arguments],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                pass_fds=passed,
                # ^C at a terminal is for the agent.
                start_new_session=True,
            )
        finally:
            for each in connections:
                each.close()

    @property
    def alive(self) -> bool:
        return bool(self._connections) and self._launcher.poll() is None

    def execute(
        self, given: object, targets: Mapping[str, object], received: Callable[..., None], check: Check
    ) -> Any:
        """Hand a task over to the ranks and return rank 0's result.

        `targets` are the objects whose methods the ranks call. `received` takes the fields of each report. Raises
        RanksEnded if a rank ends, what a rank raises, and the exceptions of `check`, after all ranks have stopped.
        The group has then ended, unless all ranks stopped in time.
        """
        self._tasks += 1
        self._unwanted = None
        path = self.folder / f"task-{self._tasks}"
        serialization.write(path, given)
        result = self.folder / RESULT_FILE
        try:
            for connection in self._connections:
                self._send(connection, TaskAt(path))
            unwanted = self._serve(targets, received, check)
            executed = None if unwanted else serialization.read(result)
        except BaseException:
            self.close()
            raise
        finally:
            path.unlink(missing_ok=True)
            result.unlink(missing_ok=True)
        if unwanted:
            raise unwanted
        return executed

    def _serve(
        self, targets: Mapping[str, object], received: Callable[..., None], check: Check
    ) -> BaseException | None:
        """Answer the ranks until the task has ended in all of them. Return what `check` raised, if they stopped."""
        working = list(self._connections)
        until = 0.0
        while working:
            if self._unwanted is None:
                try:
                    check()
                except BaseException as reason:  # noqa: BLE001  (raised when the ranks have stopped)
                    self._unwanted, until = reason, time.monotonic() + STOP_SECONDS
                    self._send(self._connections[0], StopTask())
            elif time.monotonic() > until:
                raise self._unwanted
            for connection in wait(working, LOOK_SECONDS):
                match self._received(connection):  # type: ignore[arg-type]  # of the connections given
                    case Progressed(fields):
                        received(fields)
                    case Call() as call:
                        self._send(connection, _answer(call, targets))  # type: ignore[arg-type]
                    case Ended(fault=fault):
                        working.remove(connection)  # type: ignore[arg-type]
                        if fault and self._unwanted is None:
                            self._raise_if_another_ended(fault, working)
                            raise fault
        return self._unwanted

    def _send(self, connection: Connection, message: object) -> None:
        try:
            send(connection, message)
        except OSError as fault:
            raise self._ended(connection) from fault

    def _received(self, connection: Connection) -> object:
        try:
            return receive(connection)
        except (EOFError, OSError) as fault:
            raise self._ended(connection) from fault

    def _raise_if_another_ended(self, fault: BaseException, others: list[Connection]) -> None:
        """Raise RanksEnded if a rank may have failed because another one has ended."""
        if isinstance(fault, TaskFailure) and fault.code == UNEXPLAINED:
            for connection in wait(others, LOOK_SECONDS):
                self._received(connection)  # type: ignore[arg-type]  # of the connections given

    def _ended(self, connection: Connection) -> BaseException:
        """Return the reason to end the task: the rank's end, unless the task is no longer wanted anyway."""
        return self._unwanted or RanksEnded(
            "ranks-ended", self._about({self._connections.index(connection)}, "ended")
        )

    def _about(self, ranks: set[int], what: str) -> str:
        named = ", ".join(f"{rank} ({self._devices[rank]})" for rank in sorted(ranks))
        return f"the process of rank {named} of {len(self._devices)} {what}; the worker's own log has more"

    def _remove_folder(self) -> None:
        """Remove the folder when the launcher has ended, which does so itself unless it was killed."""
        self._launcher.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """End all processes of the group and remove its folder."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._launcher.send_signal(END)
        try:
            self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel then ends the ranks.
            self._launcher.kill()
            self._launcher.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _answer(call: Call, targets: Mapping[str, object]) -> Reply:
    try:
        return Reply(getattr(targets[call.target], call.method)(*call.arguments))
    except Exception as fault:  # noqa: BLE001  (each rank raises it)
        return Reply(fault=fault)
