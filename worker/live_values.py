"""Live values of a worker for the dashboard: its machine, its line, and the latest events of its work.

Load and memory in use depend on examples, so a process that has run a task that may reveal none reports them no more:
what such a task allocated outlives it. Events are built from names and instants, never from text of the log.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tessera.shared.api.tasks import LiveValues, LogEvent, Task
from tessera.shared.host_memory import available_bytes
from tessera.shared.schema import MAX_LOG_EVENTS
from tessera.worker.training.progress import Report

STATM = Path("/proc/self/statm")


class LiveMonitor:
    """Collector of one worker's live values. `shares_log` is the site's permission to send the log tail."""

    def __init__(self, devices: Sequence[torch.device], folder: Path, *, shares_log: bool) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
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
        if self._gpus:
            with _unless_unreadable():
                several = f"{len(self._gpus)} x " if len(self._gpus) > 1 else ""
                values["gpu_name"] = f"{several}{torch.cuda.get_device_name(self._gpus[0])}"[:64]
        # They follow the size of a batch, for example, or whether training failed.
        values |= {} if self._hides else self._load()
        if self._shares_log:
            values["log"] = [*self._log, *_events(task, report.began)][-MAX_LOG_EVENTS:]
        with _unless_unreadable():
            return LiveValues.model_validate(values)
        return LiveValues()

    def _load(self) -> dict[str, float]:
        values: dict[str, float] = {}
        with _unless_unreadable():
            values["cpu_load"] = os.getloadavg()[0]
        with _unless_unreadable():
            values["memory_used_bytes"] = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        if len(self._gpus) == 1:
            with _unless_unreadable():
                free, values["gpu_memory_bytes"] = torch.cuda.mem_get_info(self._gpus[0])
                values["gpu_memory_used_bytes"] = values["gpu_memory_bytes"] - free
        elif self._gpus:
            # The ranks use these. To ask for the free memory as above would take some of each for this process.
            with _unless_unreadable():
                whole = (torch.cuda.get_device_properties(gpu).total_memory for gpu in self._gpus)
                values["gpu_memory_bytes"] = sum(whole)
                values["gpu_memory_used_bytes"] = sum(map(torch.cuda.device_memory_used, self._gpus))
        if self._gpus:
            with _unless_unreadable():
                values["gpu_use"] = fmean(map(torch.cuda.utilization, self._gpus)) / 100
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
    """Leave a value out if the system or the driver does not report it."""
    with suppress(OSError, ValueError, AttributeError, RuntimeError, ImportError, AssertionError):
        yield
