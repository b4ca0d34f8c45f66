"""Prometheus metrics. Counters count in this process; gauges are read from the tables at each scrape.

Names begin with `tessera_` and end in their unit; labels have bounded values: states, codes, routes, sites, and live
runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from tessera.coordinator.alerts.audit_sink import backlog
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.stats import Commits, RoundDurations, run_figures, silences, tasks_in_hand
from tessera.coordinator.db.studies import reads_all
from tessera.coordinator.db.views import blob_totals, merging_seconds, overdue_seconds, rounds_by_state, runs_by_state
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.api.admin import Readiness
from tessera.shared.problems import PROBLEMS
from tessera.shared.schema import RoundState, RunState
from tessera.shared.version import VERSION

# Else each counter and histogram has another series that says when it began.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

PROBLEMS_TOTAL = Counter("tessera_problems", "Requests refused, by problem code", ["code"], registry=REGISTRY)
RECEIVED_BYTES = Counter("tessera_received_bytes", "Bytes of uploads received", registry=REGISTRY)
SENT_BYTES = Counter("tessera_sent_bytes", "Bytes of blobs sent", registry=REGISTRY)
CONNECTIONS = Gauge("tessera_connections", "Connections open", registry=REGISTRY)
UPDATES_TOTAL = Counter("tessera_updates", "Updates submitted, by outcome", ["outcome"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "tessera_request_duration_seconds",
    "From a request's head to the end of its answer, by route and class of status",
    ["method", "route", "status"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
    registry=REGISTRY,
)
BUILD = Gauge("tessera_build_info", "1, with the version that runs", ["version"], registry=REGISTRY)
BUILD.labels(version=VERSION).set(1)

# A series that begins at its first 1 has not risen as far as Prometheus can see.
for code in PROBLEMS:
    PROBLEMS_TOTAL.labels(code=code)
for outcome in ("accepted", "rejected"):
    UPDATES_TOTAL.labels(outcome=outcome)

ROUND_BUCKETS = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
MERGE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics(Collector):
    """Metrics of one coordinator process. Those read from the tables hold for all processes together."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tables = CollectorRegistry()
        self._round_seconds = Histogram(
            "tessera_round_duration_seconds",
            "From a round's opening to its commit",
            buckets=ROUND_BUCKETS,
            registry=self._tables,
        )
        self._merge_seconds = Histogram(
            "tessera_merge_duration_seconds",
            "From a round's closing to its commit",
            buckets=MERGE_BUCKETS,
            registry=self._tables,
        )
        self._commits = Commits(services.database.now(), self._count)
        self._tables.register(self)

    def exposition(self, caller: Principal) -> bytes:
        """Return the metrics in the Prometheus text format: all, or of a caller's runs and sites alone."""
        with self._services.reading(caller) as session:
            if not reads_all(session):
                own = CollectorRegistry()
                own.register(_Families([*_of_tables(session, self._services.database.now())]))
                return generate_latest(own)
            self._commits.follow(session)
        return generate_latest(REGISTRY) + generate_latest(self._tables)

    def _count(self, committed: RoundDurations) -> None:
        self._round_seconds.observe(committed.round_seconds)
        self._merge_seconds.observe(committed.merge_seconds)

    def describe(self) -> list[Metric]:
        """Nothing, so that to register it reads no table."""
        return []

    def collect(self) -> Iterator[Metric]:
        services, now = self._services, self._services.database.now()
        with services.database.snapshot() as session:
            yield from _of_tables(session, now)
            live = len(live_workers(session, now - services.settings.liveness_seconds))
            blobs, blob_bytes = blob_totals(session)
            sink = services.settings.audit_sink
            behind = backlog(session, sink) if sink else None
        ready = float(readiness(services).ready)
        waiting, free_bytes = len(services.waiters.workers), services.disk.free_bytes()
        yield GaugeMetricFamily("tessera_ready", "1 if this process can do its work", ready)
        yield GaugeMetricFamily("tessera_live_workers", "Workers heard of lately", live)
        yield GaugeMetricFamily("tessera_waiting_workers", "Workers waiting here", waiting)
        yield GaugeMetricFamily("tessera_blobs", "Blobs stored", blobs)
        yield GaugeMetricFamily("tessera_disk_free_bytes", "Bytes free on the disk", free_bytes)
        yield GaugeMetricFamily("tessera_memory_used_ratio", "Share of the memory in use", services.memory.share())
        yield GaugeMetricFamily("tessera_blob_bytes", "Bytes of the blobs stored", blob_bytes)
        unsent = max(0.0, now - behind.since) if behind else 0.0
        yield GaugeMetricFamily("tessera_audit_unsent_seconds", "Age of the oldest entry that the sink lacks", unsent)
        notices = CounterMetricFamily("tessera_notices", NOTICES, labels=["channel", "outcome"])
        counts = {notifier.channel.name: (notifier.sent, notifier.failed) for notifier in services.notifiers}
        for channel in ("command", "webhook"):
            for outcome, count in zip(("sent", "failed"), counts.get(channel, (0, 0)), strict=True):
                notices.add_metric((channel, outcome), count)
        yield notices


@dataclass(eq=False)
class _Families(Collector):
    """Metrics that were read already."""

    found: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.found


def _of_tables(session: Session, now: float) -> Iterator[Metric]:
    """Yield the metrics of the runs and sites that the session reads."""
    yield from _of_runs(session)
    yield from _of_rounds(session, now)
    silent = [((site,), seconds) for site, seconds in silences(session, now)]
    yield _family("tessera_site_silent_seconds", "Since a site was last heard of", ["site"], silent)


def _family(
    name: str, described: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """Return a gauge with one series for each row: the labels' values, and the series' value."""
    family = GaugeMetricFamily(name, described, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _of_runs(session: Session) -> Iterator[Metric]:
    states, figures = runs_by_state(session), run_figures(session)
    by_state = [((state,), states.get(state, 0)) for state in get_args(RunState)]
    yield _family("tessera_runs", "Runs, by state", ["state"], by_state)
    for name, described in PER_RUN.items():
        rows = [((one.run, one.name), getattr(one, name)) for one in figures]
        yield _family(f"tessera_run_{name}", described, ["run", "name"], rows)
    measured = [
        ((one.run, one.name, measure, place), value)
        for one in figures
        for (place, measure), value in one.measured.items()
    ]
    yield _family("tessera_run_metric", MEASURED, ["run", "name", "metric", "source"], measured)


PER_RUN = {
    "version": "The latest version of a live run, which is the number of rounds that it has committed",
    "rounds": "Rounds that a live run is to have",
    "cohort": "Sites asked in a live run's last committed round",
    "updates": "Sites whose update was accepted in it",
    "upload_bytes": "Bytes of these sites' updates",
    "download_bytes": "Bytes that their workers had fetched for it",
    "coverage": "Share of the eligible sites' examples that a live run's latest version rests on",
}
NOTICES = "Notices of needs for a person that were taken, or given up after the last attempt"
MEASURED = "Metric of the latest measured version of a live run, at the central worker or as a mean over sites"


def _of_rounds(session: Session, now: float) -> Iterator[Metric]:
    states = rounds_by_state(session)
    by_state = [((state,), states.get(state, 0)) for state in get_args(RoundState)]
    yield _family("tessera_rounds", "Attempts at rounds, by state", ["state"], by_state)
    overdue, merging = overdue_seconds(session, now), merging_seconds(session, now)
    yield GaugeMetricFamily("tessera_round_overdue_seconds", "Since an open round should have closed", overdue)
    yield GaugeMetricFamily("tessera_merging_seconds", "Since a round that merges has closed", merging)
    in_hand = [((kind, state), count) for kind, state, count in tasks_in_hand(session)]
    yield _family("tessera_tasks", "Tasks of live rounds, and evaluations", ["kind", "state"], in_hand)


def readiness(services: Services) -> Readiness:
    """Return True if this version can work on the schema, the database was not found damaged, and the store accepts
    bytes, and what is missing."""
    try:
        # A newer version can replace running processes one by one.
        schema = services.database.schema() in ("current", "ahead")
    except SQLAlchemyError:
        schema = False
    writable, intact = services.blobs.writable(), services.database.damage is None
    return Readiness(
        ready=schema and writable and intact,
        database_intact=intact,
        schema_at_head=schema,
        store_writable=writable,
        store_has_space=services.disk.has(),
        conducts=services.conducts(),
    )
