"""Wakeups for waiting workers in a process that serves while another one conducts."""

import asyncio
import threading

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tasks import offered_to
from tessera.coordinator.db.workers import note_seen
from tessera.coordinator.notify.event_stream import ChangeFeed
from tessera.coordinator.notify.long_poll import LastSeen, LongPollWaiters
from tessera.coordinator.notify.wakeup import WakeupChannel, serving_name

log = structlog.get_logger()


class Poller:
    """Wakes workers that have a task on every wakeup from the conductor, and stores who was seen at every tick.

    Each tick also looks for tasks: a wakeup may be lost, and datagrams do not reach other machines.
    """

    def __init__(
        self,
        database: Database,
        last_seen: LastSeen,
        waiters: LongPollWaiters,
        change_feed: ChangeFeed,
        wakeups: WakeupChannel,
        *,
        tick_seconds: float,
    ) -> None:
        self._database = database
        self._last_seen = last_seen
        self._waiters = waiters
        self._change_feed = change_feed
        self._wakeups = wakeups
        self._tick_seconds = tick_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="poller", daemon=True)

    def start(self) -> None:
        """Start polling. Call it in the event loop of the waiters."""
        self._listener = self._wakeups.listener(serving_name())
        asyncio.get_running_loop().add_reader(self._listener.socket, self._on_wakeup)
        self._thread.start()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener.socket)
        self._listener.__exit__()
        self._ended.set()
        self._thread.join(self._tick_seconds)

    def _on_wakeup(self) -> None:
        self._waiters.notify(self._listener.received())
        self._change_feed.notify()

    def _poll(self) -> None:
        while not self._ended.wait(self._tick_seconds):
            try:
                self._tick()
            except SQLAlchemyError:
                log.exception("attendance.failed")

    def _tick(self) -> None:
        if seen := self._last_seen.take():
            with self._database.transaction() as session:
                note_seen(session, seen)
        if waiting := self._waiters.workers:
            with self._database.snapshot() as session:
                self._waiters.notify(offered_to(session, waiting))
