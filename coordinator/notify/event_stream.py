"""Server-sent events, read from the audit table.

Every change of state is an entry of the audit chain, whose number is the event's id, so that a client that reconnects
to any process resumes after the last event that it received. Each process reads the table once for all its clients:
after its own changes, on a wakeup, and at every tick.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from anyio import to_thread
from sqlalchemy import func, select

from tessera.coordinator.db.engine import DATABASE_AWAY, Database
from tessera.coordinator.db.tables import IS_LEASED, AuditRow, TaskRow
from tessera.coordinator.db.views import instant
from tessera.shared.api.admin import ChangeEvent
from tessera.shared.problems import Busy

log = structlog.get_logger()

KEPT = 2_000
"""Events kept in memory for clients that are behind; older ones are read from the table."""
BATCH = 500
"""Events read in one query."""
MIN_SECONDS = 0.1
"""Minimum time between two reads."""
BEAT_SECONDS = 15.0
"""Interval of keep-alive messages and of checks that the client is still permitted to listen."""
ENDINGS = frozenset({"token.revoke", "session.end", "site.suspend"})
"""Actions that may end a client's permission at once; expiry is noticed at the next beat."""
RETRY_MILLISECONDS = 1_000
RETRY_SECONDS = 5.0
TOKENS = 10
"""Number of tokens among which the places are divided."""


@dataclass(eq=False)
class _Listener:
    """A client of one run's events, or of all."""

    run_id: str | None
    holder: str
    """The id of its token."""
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)
    progressed: bool = False
    """A worker sent a heartbeat since the client last received a progress event."""
    unchecked: bool = True
    """Its permission must be checked before the next event."""


class ChangeFeed:
    """Events for the clients of one process. Belongs to one event loop; `notify` and `close` may be called from any
    thread."""

    def __init__(self, database: Database, *, tick_seconds: float, most_listeners: int) -> None:
        self._database = database
        self._tick_seconds = tick_seconds
        self._most = most_listeners
        self._listeners: set[_Listener] = set()
        self._kept: deque[ChangeEvent] = deque(maxlen=KEPT)
        self._last = 0
        self._leases: dict[str, tuple[float, int]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def attach(self) -> None:
        """Bind the feed to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()

    def notify(self) -> None:
        """Read the table at once if there are clients."""
        if self._listeners and self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        """End every stream, so that the server can stop."""
        self.closed = True
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def require_capacity(self, holder: str) -> None:
        """Raise Busy if no further client may listen, or none with this token."""
        if len(self._listeners) >= self._most:
            raise Busy(
                f"{self._most} clients already listen here (setting max_event_streams)",
                retry_after_seconds=RETRY_SECONDS,
            )
        most = max(1, self._most // TOKENS)
        if sum(listener.holder == holder for listener in self._listeners) >= most:
            raise Busy(
                f"{most} clients already listen with this token, 1/{TOKENS} of max_event_streams",
                retry_after_seconds=RETRY_SECONDS,
            )

    async def listen(
        self, run_id: str | None, since: int | None, holder: str, admitted: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Yield events after `since`, or from now on, of one run or of all, until the client disconnects, `admitted`
        returns False, or the process ends."""
        listener = _Listener(run_id, holder)
        self._listeners.add(listener)
        now = asyncio.get_running_loop().time
        checked_at = now()
        try:
            # Clients that come at once share one reader.
            async with self._starting:
                if self._reader is None or self._reader.done():
                    self._kept.clear()
                    self._last = await to_thread.run_sync(self._head)
                    self._reader = asyncio.create_task(self._read_on())
            seq = self._last if since is None else since
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            while not self.closed:
                listener.wakeup.clear()
                # By the clock, however many events there are; and at once after an action that may end permission.
                if listener.unchecked or now() >= checked_at + BEAT_SECONDS:
                    listener.unchecked, checked_at = False, now()
                    if not await to_thread.run_sync(admitted):
                        return
                events, seq = await self._after(seq, listener.run_id)
                for event in events:
                    yield f"id: {event.seq}\nevent: change\ndata: {event.model_dump_json()}\n\n".encode()
                if listener.progressed:
                    listener.progressed = False
                    yield b"event: progress\ndata: {}\n\n"
                if events:
                    continue
                try:
                    await asyncio.wait_for(listener.wakeup.wait(), BEAT_SECONDS)
                except TimeoutError:
                    yield b": nothing new\n\n"
        finally:
            self._listeners.discard(listener)

    async def _read_on(self) -> None:
        """Read new events while there are clients."""
        while self._listeners and not self.closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._tick_seconds)
            self._changed.clear()
            try:
                events = await to_thread.run_sync(self._read, self._last, None)
                leases = await to_thread.run_sync(self._read_leases)
            except DATABASE_AWAY as fault:
                log.warning("news.not_read", detail=str(fault).partition("\n")[0])
                continue
            if events:
                self._kept.extend(events)
                self._last = events[-1].seq
            ended = any(event.action in ENDINGS for event in events)
            progressed = {run for run, lease in leases.items() if lease != self._leases.get(run)}
            self._leases = leases
            for listener in self._listeners:
                listener.progressed |= bool(progressed) if listener.run_id is None else listener.run_id in progressed
                listener.unchecked |= ended
            if events or progressed:
                self._wake()
            await asyncio.sleep(MIN_SECONDS)

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.wakeup.set()

    async def _after(self, seq: int, run_id: str | None) -> tuple[list[ChangeEvent], int]:
        """Return the next events after `seq`, and the number up to which they are complete."""
        last = self._last
        if seq >= last:
            return [], seq
        if self._kept and self._kept[0].seq <= seq + 1:
            return [event for event in self._kept if event.seq > seq and run_id in (None, event.run)], last
        events = await to_thread.run_sync(self._read, seq, run_id)
        return events, events[-1].seq if len(events) == BATCH else max(last, events[-1].seq if events else 0)

    # ------------------------------------------------------------ the tables

    def _head(self) -> int:
        with self._database.snapshot() as session:
            return session.scalar(select(func.max(AuditRow.seq))) or 0

    def _read(self, seq: int, run_id: str | None) -> list[ChangeEvent]:
        query = select(AuditRow.seq, AuditRow.at, AuditRow.action, AuditRow.subject, AuditRow.run_id)
        query = query.where(AuditRow.seq > seq)
        if run_id is not None:
            query = query.where(AuditRow.run_id == run_id)
        with self._database.snapshot() as session:
            rows = session.execute(query.order_by(AuditRow.seq).limit(BATCH)).all()
        return [
            ChangeEvent(seq=row.seq, at=instant(row.at), action=row.action, subject=row.subject, run=row.run_id)
            for row in rows
        ]

    def _read_leases(self) -> dict[str, tuple[float, int]]:
        """Return each run's latest end of a lease and number of leases, which every heartbeat changes."""
        query = select(TaskRow.run_id, func.max(TaskRow.lease_expires_at), func.count())
        with self._database.snapshot() as session:
            rows = session.execute(query.where(IS_LEASED).group_by(TaskRow.run_id))
            return {run_id: (expires_at or 0.0, count) for run_id, expires_at, count in rows}
