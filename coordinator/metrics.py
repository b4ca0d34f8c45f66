"""What Prometheus is told. Counters count in this process; gauges are read from the tables when asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.services import Services
from coordinator.storage.snapshots import live_workers
from coordinator.storage.views import blob_totals, counts_by_state
from shared.wire import RunState

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

PROBLEMS_TOTAL = Counter("tessera_problems", "Requests refused, by problem code", ["code"], registry=REGISTRY)
RECEIVED_BYTES = Counter("tessera_received_bytes", "Bytes of uploads received", registry=REGISTRY)
SENT_BYTES = Counter("tessera_sent_bytes", "Bytes of blobs sent", registry=REGISTRY)
CONNECTIONS = Gauge("tessera_connections", "Connections open", registry=REGISTRY)
UPDATES_TOTAL = Counter("tessera_updates", "Updates handed in, by outcome", ["outcome"], registry=REGISTRY)


class TableCollector(Collector):
    """Gauges over the tables, which hold for all coordinator processes together."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        database = self._services.database
        with database.snapshot() as session:
            states = counts_by_state(session)
            live = len(live_workers(session, database.now() - self._services.settings.live_seconds))
            blobs, blob_bytes = blob_totals(session)
        runs = GaugeMetricFamily("tessera_runs", "Runs, by state", labels=["state"])
        for state in RunState.__args__:  # type: ignore[attr-defined]  # a Literal's values
            runs.add_metric([state], states.get(state, 0))
        yield runs
        yield GaugeMetricFamily("tessera_live_workers", "Workers heard of lately", live)
        yield GaugeMetricFamily("tessera_waiting_workers", "Workers waiting here", len(self._services.gate.workers))
        yield GaugeMetricFamily("tessera_blobs", "Blobs stored", blobs)
        yield GaugeMetricFamily("tessera_disk_free_bytes", "Bytes free on the disk", self._services.room.free_bytes())
        yield GaugeMetricFamily("tessera_memory_share", "Share of the memory in use", self._services.memory.share())
        yield GaugeMetricFamily("tessera_blob_bytes", "Bytes of the blobs stored", blob_bytes)


def exposition(services: Services) -> bytes:
    """Everything in the Prometheus text format."""
    tables = CollectorRegistry()
    tables.register(TableCollector(services))
    return generate_latest(REGISTRY) + generate_latest(tables)
