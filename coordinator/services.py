"""What the request handlers work with, put together once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.conductor import Conductor
from coordinator.domain.decide import Patience
from coordinator.presence import Gate, Presence
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Database
from shared.aggregation import Aggregation
from shared.inspection import Inspector
from shared.states import States


@dataclass(frozen=True)
class Services:
    settings: Settings
    database: Database
    blobs: Blobs
    states: States
    inspector: Inspector
    presence: Presence
    gate: Gate
    conductor: Conductor


def assemble(settings: Settings, clock: Callable[[], float] | None = None) -> Services:
    """Opens the database and the blob store that the settings name."""
    database = Database(settings.database_url, clock)
    blobs = Blobs(
        database,
        settings.blob_url,
        settings.staging_dir,
        inline_bytes=settings.inline_bytes,
        readahead_bytes=settings.merge_readahead_bytes,
    )
    states = States(blobs, threads=len(os.sched_getaffinity(0)))
    inspector = Inspector(blobs, states)
    presence, gate = Presence(), Gate()
    conductor = Conductor(
        database,
        blobs,
        states,
        Aggregation(states, inspector),
        presence,
        patience=Patience(settings.gather_seconds, settings.evaluation_seconds),
        live_seconds=settings.live_seconds,
        tick_seconds=settings.tick_seconds,
        notify=gate.notify,
    )
    return Services(settings, database, blobs, states, inspector, presence, gate, conductor)
