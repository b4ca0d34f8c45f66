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

from coordinator.readiness import readiness
from coordinator.services import Services
from coordinator.storage.snapshots import live_workers
from coordinator.storage.views import (
    blob_totals,
    counts_by_state,
    merging_seconds,
    overdue_seconds,
    rounds_by_state,
)
from shared.problems import PROBLEMS
from shared.wire import RoundState, RunState

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

PROBLEMS_TOTAL = Counter("tessera_problems", "Requests refused, by problem code", ["code"], registry=REGISTRY)
RECEIVED_BYTES = Counter("tessera_received_bytes", "Bytes of uploads received", registry=REGISTRY)
SENT_BYTES = Counter("tessera_sent_bytes", "Bytes of blobs sent", registry=REGISTRY)
CONNECTIONS = Gauge("tessera_connections", "Connections open", registry=REGISTRY)
UPDATES_TOTAL = Counter("tessera_updates", "Updates handed in, by outcome", ["outcome"], registry=REGISTRY)

# A series that begins at its first 1 has not risen as far as Prometheus can see.
for code in PROBLEMS:
    PROBLEMS_TOTAL.labels(code=code)
for outcome in ("accepted", "rejected"):
    UPDATES_TOTAL.labels(outcome=outcome)


class TableCollector(Collector):
    """Gauges over the tables, which hold for all coordinator processes together."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        database = self._services.database
        with database.snapshot() as session:
            now = database.now()
            states, round_states = counts_by_state(session), rounds_by_state(session)
            overdue, merging = overdue_seconds(session, now), merging_seconds(session, now)
            live = len(live_workers(session, now - self._services.settings.live_seconds))
            blobs, blob_bytes = blob_totals(session)
        runs = GaugeMetricFamily("tessera_runs", "Runs, by state", labels=["state"])
        for state in RunState.__args__:  # type: ignore[attr-defined]  # a Literal's values
            runs.add_metric([state], states.get(state, 0))
        yield runs
        rounds = GaugeMetricFamily("tessera_rounds", "Attempts at rounds, by state", labels=["state"])
        for state in RoundState.__args__:  # type: ignore[attr-defined]  # the same
            rounds.add_metric([state], round_states.get(state, 0))
        yield rounds
        yield GaugeMetricFamily("tessera_round_overdue_seconds", "Since an open round should have closed", overdue)
        yield GaugeMetricFamily("tessera_merging_seconds", "Since a round that merges has closed", merging)
        ready = float(readiness(self._services).ready)
        yield GaugeMetricFamily("tessera_ready", "Whether this process can do its work", ready)
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
