"""Wakeups for waiting workers in a process that serves while another one conducts."""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tessera.coordinator.db.engine import DATABASE_AWAY, Database, log_away
from tessera.coordinator.db.tasks import offered_to
from tessera.coordinator.notify.event_stream import ChangeFeed
from tessera.coordinator.notify.long_poll import USES_SECONDS, LastSeen, LongPollWaiters
from tessera.coordinator.notify.wakeup import WakeupChannel, serving_name

log = structlog.get_logger()


@dataclass(eq=False)
class Poller:
    """Wakes workers that have a task on every wakeup from the conductor, and stores who was seen at every tick.

    Each tick also looks for tasks: a wakeup may be lost, and datagrams do not reach other machines.
    """

    database: Database
    last_seen: LastSeen
    waiters: LongPollWaiters
    change_feed: ChangeFeed
    wakeups: WakeupChannel
    tick_seconds: float
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start polling. Call it in the event loop of the waiters."""
        self._listener = self.wakeups.listener(serving_name())
        asyncio.get_running_loop().add_reader(self._listener.socket, self._on_wakeup)
        self._thread = threading.Thread(target=self._poll, name="poller", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener.socket)
        self._listener.__exit__()
        self._ended.set()
        self._thread.join(self.tick_seconds)

    def _on_wakeup(self) -> None:
        self.waiters.notify(self._listener.received())
        self.change_feed.notify()

    def _poll(self) -> None:
        stored_at = time.monotonic()
        while not self._ended.wait(self.tick_seconds):
            try:
                self._tick()
                if time.monotonic() - stored_at > USES_SECONDS:
                    stored_at = time.monotonic()
                    self.last_seen.store_uses(self.database)
            except DATABASE_AWAY as fault:
                log_away(fault)
            except SQLAlchemyError:
                log.exception("attendance.failed")
        with suppress(SQLAlchemyError):
            self.last_seen.store_uses(self.database)

    def _tick(self) -> None:
        self.last_seen.store(self.database)
        if waiting := self.waiters.workers:
            with self.database.snapshot() as session:
                self.waiters.notify(offered_to(session, waiting))
