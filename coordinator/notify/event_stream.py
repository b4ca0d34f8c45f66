"""What happens, told as it happens to whoever listens: server-sent events, out of the tables.

Each change of state is in the audit chain, whose numbers are the ids. A process looks once for all who listen:
when it recorded something or was rung for, and at every tick while anybody listens. So it is the same news from every
process, and who was cut off goes on after the last event that they saw.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from anyio import to_thread
from sqlalchemy import func, select

from tessera.coordinator.db.engine import DATABASE_AWAY, Database
from tessera.coordinator.db.tables import AuditRow, TaskRow
from tessera.coordinator.db.views import instant
from tessera.shared.api.admin import ChangeEvent
from tessera.shared.problems import Busy

log = structlog.get_logger()

KEPT = 2_000
"""Events that are held for who comes to them late; older ones are read from the tables."""
AT_A_TIME = 500
MIN_SECONDS = 0.1
"""Between two looks, whatever happens."""
BEAT_SECONDS = 15.0
"""How often a listener is told that nothing happened, and is judged anew."""
ENDINGS = frozenset({"token.revoke", "session.end", "site.suspend"})
"""What may end somebody's right to listen. That time has passed is seen at the next beat."""
RETRY_MILLISECONDS = 1_000
RETRY_SECONDS = 5.0
TOKENS = 10
"""So many tokens, at least, it takes to have all places: one has no more than its share."""


@dataclass(eq=False)
class _Listener:
    """One who listens, to one run or to all."""

    run_id: str | None
    holder: str
    """The id of the token with which it was asked for."""
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    heard: bool = False
    """Whether workers were heard of since this was last told."""
    doubted: bool = True
    """Whether it is to be asked anew if it may listen."""


class ChangeFeed:
    """Belongs to one event loop; `ring` and `close` may be called from any thread."""

    def __init__(self, database: Database, *, tick_seconds: float, most_listeners: int) -> None:
        self._database = database
        self._tick_seconds = tick_seconds
        self._most = most_listeners
        self._listeners: set[_Listener] = set()
        self._kept: deque[ChangeEvent] = deque(maxlen=KEPT)
        self._last = 0
        self._renewed: dict[str, tuple[float, int]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def attach(self) -> None:
        """Bind it to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Something happened: look at once, if anybody listens."""
        if self._listeners and self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._rung.set)

    def close(self) -> None:
        """Send everybody home, so that the server can stop."""
        self.closed = True
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def require_place(self, holder: str) -> None:
        """Require that another may listen with this token. Raises Busy."""
        if len(self._listeners) >= self._most:
            raise Busy(
                f"{self._most} others listen here (setting max_event_streams)", retry_after_seconds=RETRY_SECONDS
            )
        most = max(1, self._most // TOKENS)
        if sum(listener.holder == holder for listener in self._listeners) >= most:
            raise Busy(
                f"{most} listen with this token already, a {TOKENS}th of max_event_streams",
                retry_after_seconds=RETRY_SECONDS,
            )

    async def listen(
        self, run_id: str | None, since: int | None, holder: str, admitted: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Yield events behind `since`, or from now on, of one run or of all, until nobody takes them, they are not
        `admitted` any more, or the process ends."""
        listener = _Listener(run_id, holder)
        self._listeners.add(listener)
        now = asyncio.get_running_loop().time
        judged_at = now()
        try:
            seq = await self._begin() if since is None else since
            await self._begin()
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            while not self.closed:
                listener.bell.clear()
                # By the clock, however much happens; and at once when somebody's admission has ended.
                if listener.doubted or now() >= judged_at + BEAT_SECONDS:
                    listener.doubted, judged_at = False, now()
                    if not await to_thread.run_sync(admitted):
                        return
                found, seq = await self._after(seq, listener.run_id)
                for one in found:
                    yield f"id: {one.seq}\nevent: change\ndata: {one.model_dump_json()}\n\n".encode()
                if listener.heard:
                    listener.heard = False
                    yield b"event: progress\ndata: {}\n\n"
                if found:
                    continue
                try:
                    await asyncio.wait_for(listener.bell.wait(), BEAT_SECONDS)
                except TimeoutError:
                    yield b": nothing new\n\n"
        finally:
            self._listeners.discard(listener)

    async def _begin(self) -> int:
        """See to it that somebody looks; the number of the last event."""
        if self._looking is None or self._looking.done():
            self._kept.clear()
            self._last = await to_thread.run_sync(self._head)
            self._looking = asyncio.create_task(self._look_on())
        return self._last

    async def _look_on(self) -> None:
        """While anybody listens."""
        while self._listeners and not self.closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._rung.wait(), self._tick_seconds)
            self._rung.clear()
            try:
                found = await to_thread.run_sync(self._read, self._last, None)
                renewed = await to_thread.run_sync(self._renewals)
            except DATABASE_AWAY as fault:
                log.warning("news.not_read", detail=str(fault).partition("\n")[0])
                continue
            if found:
                self._kept.extend(found)
                self._last = found[-1].seq
            ended = any(one.action in ENDINGS for one in found)
            moved = {run for run in renewed if renewed[run] != self._renewed.get(run)}
            self._renewed = renewed
            for listener in self._listeners:
                listener.heard |= bool(moved) if listener.run_id is None else listener.run_id in moved
                listener.doubted |= ended
            if found or moved:
                self._wake()
            await asyncio.sleep(MIN_SECONDS)

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.bell.set()

    async def _after(self, seq: int, run_id: str | None) -> tuple[list[ChangeEvent], int]:
        """Return the next events behind one, and up to where that is all."""
        if seq >= self._last:
            return [], seq
        if self._kept and self._kept[0].seq <= seq + 1:
            last = self._last
            return [one for one in self._kept if one.seq > seq and run_id in (None, one.run)], last
        last = self._last
        found = await to_thread.run_sync(self._read, seq, run_id)
        return found, found[-1].seq if len(found) == AT_A_TIME else max(last, found[-1].seq if found else 0)

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
            rows = session.execute(query.order_by(AuditRow.seq).limit(AT_A_TIME)).all()
        return [
            ChangeEvent(seq=row.seq, at=instant(row.at), action=row.action, subject=row.subject, run=row.run_id)
            for row in rows
        ]

    def _renewals(self) -> dict[str, tuple[float, int]]:
        """By run, until when its latest lease runs, and how many there are: it changes with every heartbeat."""
        query = select(TaskRow.run_id, func.max(TaskRow.lease_expires_at), func.count())
        with self._database.snapshot() as session:
            rows = session.execute(query.where(TaskRow.state == "leased").group_by(TaskRow.run_id))
            return {run_id: (expires_at or 0.0, count) for run_id, expires_at, count in rows}
