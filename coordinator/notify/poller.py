"""What a process that serves does at every tick when the conductor is another process."""

from __future__ import annotations

import asyncio
import threading

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tasks import offered_to
from tessera.coordinator.db.workers import note_seen
from tessera.coordinator.notify.event_stream import ChangeFeed
from tessera.coordinator.notify.long_poll import LastSeen, LongPollWaiters
from tessera.coordinator.notify.wakeup import WakeupChannel, WakeupListener, own_name

log = structlog.get_logger()


class Poller:
    """Enters who was heard of, and opens the gate for those who have a task: at once when its bell is rung, and at
    every tick, in case that a bell was lost or the conductor is on another machine."""

    def __init__(
        self,
        database: Database,
        presence: LastSeen,
        gate: LongPollWaiters,
        news: ChangeFeed,
        bells: WakeupChannel,
        *,
        tick_seconds: float,
    ) -> None:
        self._database = database
        self._presence = presence
        self._gate = gate
        self._news = news
        self._bells = bells
        self._tick_seconds = tick_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="attendance", daemon=True)

    def begin(self) -> None:
        """To be called within the event loop that the gate belongs to."""
        self._bell: WakeupListener = self._bells.hung_up(own_name())
        asyncio.get_running_loop().add_reader(self._bell.socket, self._rung)
        self._thread.start()

    def end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._bell.socket)
        self._bell.__exit__()
        self._ended.set()
        self._thread.join(self._tick_seconds)

    def _rung(self) -> None:
        self._gate.notify(self._bell.rung_for())
        self._news.ring()

    def _attend(self) -> None:
        while not self._ended.wait(self._tick_seconds):
            try:
                self._tick()
            except SQLAlchemyError:
                log.exception("attendance.failed")

    def _tick(self) -> None:
        if seen := self._presence.take():
            with self._database.transaction() as session:
                note_seen(session, seen)
        if waiting := self._gate.workers:
            with self._database.snapshot() as session:
                self._gate.notify(offered_to(session, waiting))
