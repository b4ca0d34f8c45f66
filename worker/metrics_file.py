"""A worker's metrics for Prometheus.

The worker listens on no port, so it writes a file that node_exporter's textfile collector reads.
"""

from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, write_to_textfile

BUCKETS = (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)

disable_created_metrics()  # type: ignore[no-untyped-call]


class WorkerCounts:
    """Counts since this process started. Each change rewrites the file, if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.registry = registry = CollectorRegistry()
        self._asked = Gauge(
            "tessera_worker_last_claim_timestamp_seconds", "Time of its last claim", registry=registry
        )
        self._usable = Gauge("tessera_worker_settings_valid", "Whether its settings file is valid", registry=registry)
        self._usable.set(1)
        self._tasks = Counter("tessera_worker_tasks", "Tasks claimed", ["kind", "outcome"], registry=registry)
        self._seconds = Histogram(
            "tessera_worker_task_duration_seconds",
            "Time from a claimed task to its end",
            ["kind"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._received = Counter("tessera_worker_received_bytes", "Bytes fetched for tasks", registry=registry)
        self._sent = Counter("tessera_worker_sent_bytes", "Bytes of updates sent", registry=registry)

    def settings(self, *, usable: bool) -> None:
        self._usable.set(usable)
        self._write()

    def asking(self, at: float) -> None:
        """`at` is in seconds since 1970."""
        self._asked.set(at)
        self._write()

    def ended(self, kind: str, outcome: str, seconds: float, *, received_bytes: int, sent_bytes: int) -> None:
        """Count a task and its bytes; one whose update is `held` is counted when that has left, or may not."""
        if outcome == "held":
            return
        self._tasks.labels(kind=kind, outcome=outcome).inc()
        self._seconds.labels(kind=kind).observe(seconds)
        self._received.inc(received_bytes)
        self._sent.inc(sent_bytes)
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            # Written under another name first, so that no reader sees half of it.
            write_to_textfile(str(self._file), self.registry)
        except OSError as fault:
            # The worker continues without metrics.
            structlog.get_logger("worker").warning("figures-not-written", file=str(self._file), reason=fault.strerror)
