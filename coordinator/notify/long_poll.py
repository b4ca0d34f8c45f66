"""Who was heard of lately, and who is waiting for a task.

Both live in memory because losing them costs nothing: a worker is heard of again at its next call, and who waits asks
again. Idle workers therefore cost the database nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class LastSeen:
    """When each worker was last heard of, since the last time this was asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}

    def note(self, worker_id: str, now: float) -> None:
        with self._lock:
            self._seen[worker_id] = now

    def take(self) -> dict[str, float]:
        with self._lock:
            seen, self._seen = self._seen, {}
        return seen


class LongPollWaiters:
    """Where claims wait. Belongs to one event loop; `notify` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bells: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closed = False

    def attach(self) -> None:
        """Bind the gate to the running loop."""
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def waiting(self, worker_id: str) -> Iterator[asyncio.Event]:
        """Yield a bell that rings when there may be a task for the worker. Rings before anything is missed."""
        bell = asyncio.Event()
        self._bells[worker_id].add(bell)
        try:
            yield bell
        finally:
            self._bells[worker_id].discard(bell)
            if not self._bells[worker_id]:
                del self._bells[worker_id]

    @property
    def workers(self) -> list[str]:
        """Who is waiting now."""
        return list(self._bells)

    def notify(self, worker_ids: Sequence[str]) -> None:
        if worker_ids and self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring, worker_ids)

    def close(self) -> None:
        """Send everybody home, so that the server can stop."""
        self.closed = True
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._ring(list(self._bells)))

    def _ring(self, worker_ids: Sequence[str]) -> None:
        for worker_id in worker_ids:
            for bell in self._bells.get(worker_id, ()):
                bell.set()
