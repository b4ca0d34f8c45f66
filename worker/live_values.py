"""Live values of a worker for the dashboard: its machine, its line, and the latest events of its work.

Load and memory in use depend on examples, so a process that has run a task that may reveal none reports them no more:
what such a task allocated outlives it. Events are built from names and instants, never from text of the log.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tessera.shared.api.tasks import LiveValues, LogEvent, Task
from tessera.shared.host_memory import available_bytes
from tessera.shared.schema import MAX_LOG_EVENTS
from tessera.worker.executor.launcher import resident_bytes
from tessera.worker.training.progress import Report


class LiveMonitor:
    """Collector of one worker's live values. `shares_log` is the site's permission to send the log tail, and
    `executor_bytes` returns the memory of the processes that execute tasks."""

    def __init__(self, gpu: str | None, folder: Path, executor_bytes: Callable[[], int], *, shares_log: bool) -> None:
        self._gpu = gpu
        self._executor_bytes = executor_bytes
        self._folder = folder
        self._shares_log = shares_log
        self._started_at = _second(time.time())
        self._log: deque[LogEvent] = deque([LogEvent(at=self._started_at, event="started")], maxlen=MAX_LOG_EVENTS)
        self._speeds: dict[str, float] = {}
        self._hides = False
        """True from the first task on that may reveal nothing of an example."""

    def ended(self, task: Task, report: Report, outcome: Any) -> None:
        """Note how a task ended: `outcome` is the name of an event."""
        self._hides |= report.hides
        self._measure_line(report)
        self._log.extend(_events(task, [*report.began, (time.time(), outcome)]))

    def sample(self, task: Task, report: Report) -> LiveValues:
        """Return the present values, without any that cannot be read."""
        self._hides |= report.hides
        self._measure_line(report)
        values: dict[str, Any] = {"started_at": self._started_at, **self._speeds}
        with _unless_unreadable():
            values["disk_free_bytes"] = shutil.disk_usage(self._folder).free
        with _unless_unreadable():
            values |= {"cpus": len(os.sched_getaffinity(0)), "memory_bytes": available_bytes()}
        if self._gpu:
            values["gpu_name"] = self._gpu
        # They follow the size of a batch, for example, or whether training failed.
        values |= {} if self._hides else self._load(report)
        if self._shares_log:
            values["log"] = [*self._log, *_events(task, report.began)][-MAX_LOG_EVENTS:]
        with _unless_unreadable():
            return LiveValues.model_validate(values)
        return LiveValues()

    def _load(self, report: Report) -> dict[str, float]:
        values = dict(report.gpu_use)
        with _unless_unreadable():
            values["cpu_load"] = os.getloadavg()[0]
        with _unless_unreadable():
            values["memory_used_bytes"] = resident_bytes() + self._executor_bytes()
        return values

    def _measure_line(self, report: Report) -> None:
        """Keep the speed of the last transfer that took a second or more, unless its time could follow from examples:
        texts become tokens while a version is fetched."""
        if report.hides:
            return
        seconds = report.phase_seconds()
        moved = {"fetching": ("download", report.download_bytes), "uploading": ("upload", report.upload_bytes)}
        for phase, (name, nbytes) in moved.items():
            if nbytes and (took := seconds.get(phase, 0.0)):  # type: ignore[call-overload]  # its keys are phases
                self._speeds[f"{name}_bytes_per_second"] = nbytes / took


def _events(task: Task, began: Sequence[tuple[float, Any]]) -> list[LogEvent]:
    return [LogEvent(at=_second(at), event=event, run=task.run_name, round=task.round) for at, event in began]


def _second(at: float) -> datetime:
    """Return an instant to the second: more would be a figure of the data's size."""
    return datetime.fromtimestamp(int(at), UTC)


@contextmanager
def _unless_unreadable() -> Iterator[None]:
    """Leave a value out if the system does not report it."""
    with suppress(OSError, ValueError, AttributeError):
        yield
