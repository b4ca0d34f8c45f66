"""The parts of a coordinator, assembled from its settings."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqlalchemy.orm import Session

from tessera.coordinator.alerts.attention import Alert, alerts
from tessera.coordinator.alerts.audit_sink import AuditShipper
from tessera.coordinator.alerts.notices import Notifier
from tessera.coordinator.auth.permissions import reading
from tessera.coordinator.blobs.quota import Quota
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.blobs.uploads import Uploads
from tessera.coordinator.blobs.version_diffs import Differences
from tessera.coordinator.conductor.actions import Actions
from tessera.coordinator.conductor.conductor import Conductor
from tessera.coordinator.conductor.failures import ActionFailures
from tessera.coordinator.conductor.liveness import Liveness
from tessera.coordinator.conductor.round_actions import RoundActions
from tessera.coordinator.conductor.secure_sums import SecureRounds
from tessera.coordinator.conductor.wakeups import ConductorWakeups
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.studies import CallerSession
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.domain.snapshot import Timeouts
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.limits.memory import Memory
from tessera.coordinator.limits.rate import CallerRates
from tessera.coordinator.limits.request_memory import BodyMemory, ResponseMemory
from tessera.coordinator.limits.thread_pool import FairThreadPool, KeyedLocks
from tessera.coordinator.maintenance.garbage_collection import Retention
from tessera.coordinator.notify.event_stream import ChangeFeed
from tessera.coordinator.notify.long_poll import LastSeen, LongPollWaiters
from tessera.coordinator.notify.poller import Poller
from tessera.coordinator.notify.wakeup import PostgresWakeups, SocketWakeups, WakeupChannel
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.rounds.aggregate import Aggregation
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States

if TYPE_CHECKING:
    from tessera.coordinator.auth.oidc import OIDCLogin, OIDCVerifier

Duty = Literal["both", "serve", "conduct"]
"""A process's share of a coordinator's work."""

UPLOAD_THREADS = 8
"""More than processors: they mostly wait for the disk."""


@dataclass(frozen=True)
class Services:
    settings: CoordinatorSettings
    database: Database
    disk: DiskSpace
    memory: Memory
    admission: CallerRates
    answers: ResponseMemory
    bodies: BodyMemory
    blobs: Blobs
    states: States
    inspector: Inspector
    inspections: FairThreadPool
    """For the slow part of each submission, and for parsing large bodies."""
    submitting: KeyedLocks
    uploads: Uploads
    hashing: KeyedLocks
    """Of blobs that are verified before they are sent."""
    differences: Differences
    last_seen: LastSeen
    waiters: LongPollWaiters
    change_feed: ChangeFeed
    conductor: Conductor
    wakeups: WakeupChannel
    poller: Poller
    people: OIDCVerifier | None
    """Verifies tokens of the OpenID provider, if there is one."""
    sign_in: OIDCLogin | None
    """Sign-in to the dashboard at the OpenID provider, if it is enabled."""
    retention: Retention
    alerts: Callable[[Session, float], Iterable[Alert]]
    """Yields everything that needs a person at an instant."""
    notifiers: Sequence[Notifier]
    shipper: AuditShipper | None
    """Sends the audit to a sink, if there is one."""
    wake_conductor: Callable[..., None]
    """Has the conductor, in any process, look at once: at the runs that are named, or at all."""
    wake_workers: Callable[[Sequence[str]], None]
    """Wakes these workers in every process where they may wait."""
    conducts: Callable[[], bool] = lambda: True
    """Returns False if this process has a child that conducts, and it has stopped."""

    def reading(self, caller: Principal) -> AbstractContextManager[CallerSession]:
        """Return a session, for `with`, that finds only the rows that the caller may read."""
        return reading(self.database, caller)

    def release_waiters(self) -> None:
        """End every long poll and event stream, so that the server can stop."""
        self.waiters.close()
        self.change_feed.close()


def assemble(
    settings: CoordinatorSettings, clock: Callable[[], float] | None = None, duty: Duty = "both"
) -> Services:
    """Return the parts that the duty needs, with the database and the blob store of the settings open.

    A process with both duties wakes itself; others wake each other by `wakeups`.
    """
    database = Database(settings.database_url, clock, connections=settings.database_connections)
    blobs = Blobs(database, settings.blob_url, settings.staging_dir, settings.inline_bytes)
    blobs.require_same_disk()
    disk = DiskSpace(_folders(database, blobs), settings.disk_reserve_bytes)
    states = States(blobs, threads=1 if duty == "serve" else len(os.sched_getaffinity(0)))
    inspector = Inspector(blobs, states)
    last_seen, waiters = LastSeen(), LongPollWaiters()
    wakeups: WakeupChannel = (
        SocketWakeups(settings.staging_dir / "bells") if database.is_sqlite else PostgresWakeups(database)
    )
    wake_workers = waiters.notify if duty == "both" else wakeups.wake_workers
    change_feed = ChangeFeed(database, tick_seconds=settings.tick_seconds, most_listeners=settings.max_event_streams)
    liveness = Liveness(database, settings.liveness_seconds)
    secure = SecureRounds(database, blobs, states, liveness)
    conductor = Conductor(
        database,
        liveness,
        RoundActions(database, blobs, states, Aggregation(states, inspector), disk, liveness, secure),
        Actions(database, blobs, states, liveness, secure),
        ActionFailures(database),
        ConductorWakeups(settings.tick_seconds, settings.heartbeat),
        last_seen,
        Timeouts(settings.cohort_wait_seconds, settings.evaluation_seconds, settings.lease_seconds),
        notify=wake_workers,
    )
    quota = Quota(_bytes_per_day(settings, blobs))
    uploads = Uploads(
        database, blobs, disk, quota, settings.idle_timeout_seconds, FairThreadPool("upload", UPLOAD_THREADS)
    )
    retention = Retention(
        database,
        blobs,
        states,
        uploads,
        updates_seconds=settings.keep_updates_seconds,
        unused_seconds=settings.keep_unused_seconds,
        versions=settings.keep_versions,
        every_seconds=settings.gc_interval_seconds,
    )
    memory = Memory(settings.memory_limit_bytes)
    needs = partial(alerts, settings=settings, disk=disk, memory=memory)
    page_url = f"{(settings.public_url or '').rstrip('/')}/page"
    people, sign_in = _open_id(settings) if duty != "conduct" else (None, None)

    def wake_conductor(*run_ids: str) -> None:
        if duty == "both":
            conductor.wakeups.call(*run_ids)
        else:
            wakeups.wake_conductor(run_ids)
        change_feed.notify()

    return Services(
        settings=settings,
        database=database,
        disk=disk,
        memory=memory,
        admission=CallerRates(
            settings.requests_per_second,
            settings.auth_failures_per_minute,
            settings.enrolments_per_minute,
            clock or time.monotonic,
        ),
        answers=ResponseMemory(),
        bodies=BodyMemory(settings.body_memory_bytes),
        blobs=blobs,
        states=states,
        inspector=inspector,
        inspections=FairThreadPool("inspection", max(2, len(os.sched_getaffinity(0)))),
        submitting=KeyedLocks(),
        uploads=uploads,
        hashing=KeyedLocks(),
        differences=Differences(database, blobs, states, disk, FairThreadPool("difference", 2), retention.remove),
        last_seen=last_seen,
        waiters=waiters,
        change_feed=change_feed,
        conductor=conductor,
        wakeups=wakeups,
        poller=Poller(database, last_seen, waiters, change_feed, wakeups, tick_seconds=settings.tick_seconds),
        people=people,
        sign_in=sign_in,
        retention=retention,
        alerts=needs,
        notifiers=[
            Notifier(database, needs, channel, page_url, settings.liveness_seconds)
            for channel in settings.notice_channels
        ],
        shipper=AuditShipper(database, str(settings.audit_sink), sink) if (sink := settings.audit_receiver) else None,
        wake_conductor=wake_conductor,
        wake_workers=wake_workers,
    )


def _folders(database: Database, blobs: Blobs) -> list[Path]:
    """Return the folders written to on this machine. Blobs in a folder share the staging folder's disk."""
    url = database.url
    embedded = [Path(url.database).parent] if database.is_sqlite and url.database else []
    return [blobs.staging_dir, *embedded]


def _bytes_per_day(settings: CoordinatorSettings, blobs: Blobs) -> int | None:
    """Return the bytes that a site may announce within a day: half of the blobs' disk by default."""
    if settings.site_bytes_per_day is not None or "://" in settings.blob_url:
        return settings.site_bytes_per_day
    disk = os.statvfs(blobs.staging_dir)
    return disk.f_blocks * disk.f_frsize // 2


def _open_id(settings: CoordinatorSettings) -> tuple[OIDCVerifier | None, OIDCLogin | None]:
    """Return the verifier of the provider's tokens, and the sign-in at the provider, as far as they are enabled."""
    if settings.oidc_issuer is None:
        return None, None
    # Its libraries are slow to import, and most coordinators do not need them.
    oidc = importlib.import_module("tessera.coordinator.auth.oidc")
    people = oidc.OIDCVerifier(settings)
    return people, oidc.OIDCLogin(settings, people) if settings.oidc_client_id is not None else None
