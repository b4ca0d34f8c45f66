"""Workers that were seen lately, and claims that wait for a task.

Both are kept in memory: after a restart workers call again and claims are repeated. Idle workers therefore cost the
database nothing.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.workers import note_seen, note_used

USES_SECONDS = 60.0
"""Precision of the instants at which tokens were last used, and the interval at which they are stored."""


class LastSeen:
    """The instant of each worker's last call since the last `store`, and the token that it showed.

    The instants at which tokens were used are held for longer, so that each is stored once a minute at most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, str]] = {}
        self._used: dict[str, float] = {}

    def note(self, worker_id: str, now: float, token_id: str) -> None:
        with self._lock:
            self._seen[worker_id] = (now, token_id)

    def store(self, database: Database) -> None:
        """Store who was seen since the last call."""
        with self._lock:
            seen, self._seen = self._seen, {}
        if seen:
            with database.transaction() as session:
                note_seen(session, database.now(), seen)

    def note_use(self, token_id: str, now: float) -> None:
        """Note a use of a token, unless one was noted within the last minute."""
        if now - self._used.get(token_id, 0.0) >= USES_SECONDS:
            with self._lock:
                self._used[token_id] = now

    def last_use(self, token_id: str) -> float | None:
        """Return the last use of a token that is not stored yet."""
        return self._used.get(token_id)

    def store_uses(self, database: Database) -> None:
        """Store which tokens were used since the last call."""
        with self._lock:
            used, self._used = self._used, {}
        if used:
            with database.transaction() as session:
                note_used(session, used)


class LongPollWaiters:
    """Claims that wait. Belongs to one event loop; `notify` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closed = False

    def attach(self) -> None:
        """Bind the waiters to the running loop."""
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def waiting(self, worker_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set when there may be a task for the worker; enter before looking for one."""
        event = asyncio.Event()
        self._events[worker_id].add(event)
        try:
            yield event
        finally:
            self._events[worker_id].discard(event)
            if not self._events[worker_id]:
                del self._events[worker_id]

    @property
    def workers(self) -> list[str]:
        """The workers with a waiting claim."""
        return list(self._events)

    def notify(self, worker_ids: Sequence[str]) -> None:
        if worker_ids and self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set, worker_ids)

    def close(self) -> None:
        """End every wait, so that the server can stop."""
        self.closed = True
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._set(self.workers))

    def _set(self, worker_ids: Sequence[str]) -> None:
        for worker_id in worker_ids:
            for event in self._events.get(worker_id, ()):
                event.set()
