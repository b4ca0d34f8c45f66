"""What the request handlers work with, put together once."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.blobs.uploads import Quota, Uploads
from tessera.coordinator.blobs.version_diffs import Differences
from tessera.coordinator.conductor.actions import Actions, Liveness
from tessera.coordinator.conductor.conductor import Conductor
from tessera.coordinator.conductor.merge import RoundMerger
from tessera.coordinator.db.engine import Database
from tessera.coordinator.domain.decide import Timeouts
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.limits.memory import Memory
from tessera.coordinator.limits.rate import Admission
from tessera.coordinator.limits.response_memory import Answers
from tessera.coordinator.limits.thread_shares import OneAtATime, Shares
from tessera.coordinator.maintenance.garbage_collection import Housekeeping, Retention
from tessera.coordinator.notify.event_stream import ChangeFeed
from tessera.coordinator.notify.long_poll import LastSeen, LongPollWaiters
from tessera.coordinator.notify.poller import Poller
from tessera.coordinator.notify.wakeup import FolderBells, PostgresWakeups, WakeupChannel
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.rounds.aggregate import Aggregation
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import MergeEngine, States, materialize

if TYPE_CHECKING:
    from tessera.coordinator.auth.oidc import OIDCVerifier
    from tessera.coordinator.auth.oidc_login import OIDCLogin

Duty = Literal["both", "serve", "conduct"]
"""What a process does of a coordinator's work."""


UPLOAD_THREADS = 8
"""Most of what they do is waiting for the disk."""


@dataclass(frozen=True)
class Services:
    settings: CoordinatorSettings
    database: Database
    room: DiskSpace
    memory: Memory
    admission: Admission
    answers: Answers
    blobs: Blobs
    states: States
    inspector: Inspector
    inspections: Shares
    """For what takes long of each submission."""
    submitting: OneAtATime
    uploads: Uploads
    differences: Differences
    presence: LastSeen
    gate: LongPollWaiters
    news: ChangeFeed
    conductor: Conductor
    bells: WakeupChannel
    attendance: Poller
    people: OIDCVerifier | None
    """Who holds a token of the OpenID provider, if there is one."""
    sign_in: OIDCLogin | None
    """Where people sign in to the page, if that is at the provider."""
    housekeeping: Housekeeping
    call: Callable[[], None]
    """Something happened: the conductor, in whatever process, is to look at once."""
    wake: Callable[[Sequence[str]], None]
    """These workers have something to do, wherever they wait."""

    def send_home(self) -> None:
        """Let go of everybody who waits or listens, so that the server can stop."""
        self.gate.close()
        self.news.close()


def assemble(
    settings: CoordinatorSettings, clock: Callable[[], float] | None = None, duty: Duty = "both"
) -> Services:
    """Open the database and the blob store that the settings name.

    A process that does both tells itself; the others tell each other by bells.
    """
    database = Database(settings.database_url, clock, connections=settings.database_connections)
    blobs = Blobs(
        database,
        settings.blob_url,
        settings.staging_dir,
        inline_bytes=settings.inline_bytes,
        readahead_bytes=settings.merge_readahead_bytes,
    )
    room = DiskSpace(_folders(database, blobs), settings.disk_reserve_bytes)
    states = States(blobs, _engine(settings) if duty != "serve" else None)
    inspector = Inspector(blobs, states)
    presence, gate = LastSeen(), LongPollWaiters()
    bells: WakeupChannel = (
        FolderBells(settings.staging_dir / "bells") if database.is_sqlite else PostgresWakeups(database)
    )
    wake = gate.notify if duty == "both" else bells.wake
    news = ChangeFeed(database, tick_seconds=settings.tick_seconds, most_listeners=settings.max_event_streams)
    liveness = Liveness(database, settings.liveness_seconds)
    conductor = Conductor(
        database,
        liveness,
        Actions(database, states, liveness),
        RoundMerger(database, blobs, states, Aggregation(states, inspector), room, liveness),
        presence,
        patience=Timeouts(settings.cohort_wait_seconds, settings.evaluation_seconds),
        tick_seconds=settings.tick_seconds,
        heartbeat_file=settings.heartbeat_file,
        notify=wake,
    )
    quota = Quota(_bytes_per_day(settings, blobs), settings.site_unfinished_uploads)
    uploads = Uploads(database, blobs, room, quota, settings.idle_timeout_seconds, Shares("upload", UPLOAD_THREADS))
    people = _people(settings) if duty != "conduct" else None
    return Services(
        settings=settings,
        database=database,
        room=room,
        memory=Memory(settings.memory_limit_bytes),
        admission=Admission(
            settings.requests_per_second,
            settings.request_burst,
            settings.auth_failures_per_minute,
            settings.enrolments_per_minute,
            settings.declarations_per_hour,
            clock or time.monotonic,
        ),
        answers=Answers(settings.response_bytes_per_token),
        blobs=blobs,
        states=states,
        inspector=inspector,
        inspections=Shares("inspection", max(2, len(os.sched_getaffinity(0)))),
        submitting=OneAtATime(),
        uploads=uploads,
        differences=Differences(database, blobs, states),
        presence=presence,
        gate=gate,
        news=news,
        conductor=conductor,
        bells=bells,
        attendance=Poller(database, presence, gate, news, bells, tick_seconds=settings.tick_seconds),
        people=people,
        sign_in=_sign_in(settings, people) if people else None,
        housekeeping=Housekeeping(
            _retention(settings, database, blobs, states, uploads), settings.gc_interval_seconds
        ),
        call=_each(conductor.call if duty == "both" else bells.call, news.ring),
        wake=wake,
    )


def _each(*calls: Callable[[], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def _retention(
    settings: CoordinatorSettings, database: Database, blobs: Blobs, states: States, uploads: Uploads
) -> Retention:
    return Retention(
        database,
        blobs,
        states,
        uploads,
        updates_seconds=settings.keep_updates_seconds,
        unused_seconds=settings.keep_unused_seconds,
        versions=settings.keep_versions,
    )


def _folders(database: Database, blobs: Blobs) -> list[Path]:
    """Return where what is written goes, as far as it is on this machine. Blobs in a folder share a disk with
    staging."""
    url = database.url
    embedded = [Path(url.database).parent] if url.get_backend_name() == "sqlite" and url.database else []
    return [blobs.staging_dir, *embedded]


def _bytes_per_day(settings: CoordinatorSettings, blobs: Blobs) -> int | None:
    """Return what a site may announce within a day: if no setting says so, half of what the disk of the blobs
    holds."""
    if settings.site_bytes_per_day is not None or "://" in settings.blob_url:
        return settings.site_bytes_per_day
    disk = os.statvfs(blobs.staging_dir)
    return disk.f_blocks * disk.f_frsize // 2


def _people(settings: CoordinatorSettings) -> OIDCVerifier | None:
    if settings.oidc_issuer is None:
        return None
    # Its libraries take long to import, and most coordinators have no use for them.
    found: OIDCVerifier = importlib.import_module("tessera.coordinator.auth.oidc").OIDCVerifier(settings)
    return found


def _sign_in(settings: CoordinatorSettings, people: OIDCVerifier) -> OIDCLogin | None:
    if settings.oidc_client_id is None:
        return None
    found: OIDCLogin = importlib.import_module("tessera.coordinator.auth.oidc_login").OIDCLogin(settings, people)
    return found


def _engine(settings: CoordinatorSettings) -> MergeEngine:
    """Return what merges: all cores of this machine, or a Ray cluster."""
    if settings.merge_engine == "ray":
        # Ray is an extra, and slow to import.
        made: MergeEngine = importlib.import_module("tessera.coordinator.conductor.ray_engine").RayEngine(
            settings.ray_address
        )
        return made
    return partial(materialize, threads=len(os.sched_getaffinity(0)))
