"""Server-sent events, read from the audit table.

Every change of state is an entry of the audit chain, whose number is the event's id, so that a client that reconnects
to any process resumes after the last event that it received. Each process reads the table once for all its clients:
after its own changes, on a wakeup, and at every tick.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from anyio import to_thread
from sqlalchemy import func, select

from tessera.coordinator.db.engine import DATABASE_AWAY, Database
from tessera.coordinator.db.tables import IS_LEASED, AuditRow, RunRow, TaskRow
from tessera.coordinator.db.views import instant
from tessera.shared.api.admin import ChangeEvent
from tessera.shared.problems import Busy

log = structlog.get_logger()

KEPT = 2_000
"""Events kept in memory for clients that are behind; older ones are read from the table."""
MAX_SEQ = (1 << 53) - 1
BATCH = 500
"""Events read in one query."""
MIN_SECONDS = 0.1
"""Minimum time between two reads."""
BEAT_SECONDS = 15.0
"""Interval of keep-alive messages and of checks that the client is still permitted to listen."""
ENDINGS = frozenset({"token.revoke", "session.end", "site.suspend", "study.create", "study.add", "study.remove"})
"""Actions that may change a client's permission at once; expiry is noticed at the next beat."""
RETRY_MILLISECONDS = 1_000
RETRY_SECONDS = 5.0
TOKENS = 10
"""Number of tokens among which the places are divided."""
HALF_BITS = 26
"""Half of the bits of an event's id, which JavaScript reads as a float."""


@dataclass(frozen=True)
class Permission:
    """The present permission of a client to listen."""

    studies: frozenset[str] | None
    """The studies whose runs' events it may receive; None for all events, also events of no run."""

    def covers(self, study: str | None) -> bool:
        return self.studies is None or study in self.studies


def shuffled(number: int, key: bytes, *, back: bool = False) -> int:
    """Return the place of a number in a permutation that only holders of the key know, or the number of a place: the
    distance of two ids must not count the events of others between them. A Feistel network of four rounds."""
    left, right = divmod(number, 1 << HALF_BITS)
    for turn in range(4):
        if back:
            left, right = right ^ _mixed(left, 3 - turn, key), left
        else:
            left, right = right, left ^ _mixed(right, turn, key)
    return left << HALF_BITS | right


def _mixed(half: int, turn: int, key: bytes) -> int:
    digest = hashlib.blake2b(f"{turn} {half}".encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest) >> 64 - HALF_BITS


_Entry = tuple[ChangeEvent, str | None]
"""An event, and the study of its run."""


@dataclass(eq=False)
class _Listener:
    """A client of one run's events, or of all."""

    run_id: str | None
    permission: Permission
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
        self._kept: deque[_Entry] = deque(maxlen=KEPT)
        self._last = 0
        self._key = b""
        self._leases: dict[tuple[str, str], tuple[float, int]] = {}
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
        self, run_id: str | None, since: int | None, holder: str, permission: Callable[[], Permission | None]
    ) -> AsyncIterator[bytes]:
        """Yield events after `since`, or from now on, of one run or of all runs within the client's `permission`,
        until the client disconnects, has no permission any more, or the process ends."""
        listener = _Listener(run_id, Permission(frozenset()), holder)
        self._listeners.add(listener)
        now = asyncio.get_running_loop().time
        checked_at = now()
        try:
            # Clients that come at once share one reader.
            async with self._starting:
                if self._reader is None or self._reader.done():
                    self._kept.clear()
                    self._last, self._key = await to_thread.run_sync(self._head)
                    self._reader = asyncio.create_task(self._read_on())
            seq = self._last if since is None else since
            resumes = since is not None
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            while not self.closed:
                listener.wakeup.clear()
                # By the clock, however many events there are; and at once after an action that may end permission.
                if listener.unchecked or now() >= checked_at + BEAT_SECONDS:
                    listener.unchecked, checked_at = False, now()
                    if (found := await to_thread.run_sync(permission)) is None:
                        return
                    listener.permission = found
                    if resumes and found.studies is not None:
                        # An id of a time when its caller read all studies is none of these, and comes out beyond.
                        seq = min(shuffled(seq, self._key, back=True), self._last)
                    resumes = False
                events, seq = await self._after(seq, listener)
                for event in self._shown(events, listener):
                    yield f"id: {event.seq}\nevent: change\ndata: {event.model_dump_json()}\n\n".encode()
                if listener.progressed:
                    listener.progressed = False
                    yield b"event: progress\ndata: {}\n\n"
                # The events in between may all be of others.
                if events or seq < self._last:
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
                entries = await to_thread.run_sync(self._read, self._last)
                leases = await to_thread.run_sync(self._read_leases)
            except DATABASE_AWAY as fault:
                log.warning("news.not_read", detail=str(fault).partition("\n")[0])
                continue
            if entries:
                self._kept.extend(entries)
                self._last = entries[-1][0].seq
            ended = any(event.action in ENDINGS for event, _ in entries)
            progressed = {run for run, lease in leases.items() if lease != self._leases.get(run)}
            self._leases = leases
            for listener in self._listeners:
                listener.progressed |= any(
                    listener.run_id in (None, run) and listener.permission.covers(study) for run, study in progressed
                )
                listener.unchecked |= ended
            if entries or progressed:
                self._wake()
            await asyncio.sleep(MIN_SECONDS)

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.wakeup.set()

    def _shown(self, events: Sequence[ChangeEvent], to: _Listener) -> Sequence[ChangeEvent]:
        if to.permission.studies is None:
            return events
        return [event.model_copy(update={"seq": shuffled(event.seq, self._key)}) for event in events]

    async def _after(self, seq: int, to: _Listener) -> tuple[list[ChangeEvent], int]:
        """Return the next events after `seq` for a listener, and the number up to which they are complete."""
        last = self._last
        if seq >= last:
            return [], seq
        covers, run_id = to.permission.covers, to.run_id
        if self._kept and self._kept[0][0].seq <= seq + 1:
            kept = (event for event, study in self._kept if event.seq > seq and covers(study))
            return [event for event in kept if run_id in (None, event.run)], last
        # Not beyond: an entry there may end the permission.
        read = await to_thread.run_sync(self._read, seq, run_id, last)
        reached = read[-1][0].seq if len(read) == BATCH else last
        return [event for event, study in read if covers(study)], reached

    # ------------------------------------------------------------ the tables

    def _head(self) -> tuple[int, bytes]:
        """Return the number of the last entry, and the key of ids: of the first entry, so that all processes have the
        same, and which only administrators can read."""
        with self._database.snapshot() as session:
            first = session.scalar(select(AuditRow.digest).where(AuditRow.seq == 1)) or ""
            return session.scalar(select(func.max(AuditRow.seq))) or 0, hashlib.sha256(first.encode()).digest()

    def _read(self, seq: int, run_id: str | None = None, last: int = MAX_SEQ) -> list[_Entry]:
        query = select(AuditRow.seq, AuditRow.at, AuditRow.action, AuditRow.subject, AuditRow.run_id, RunRow.study)
        query = query.outerjoin(RunRow, RunRow.id == AuditRow.run_id).where(AuditRow.seq > seq, AuditRow.seq <= last)
        if run_id is not None:
            query = query.where(AuditRow.run_id == run_id)
        with self._database.snapshot() as session:
            rows = session.execute(query.order_by(AuditRow.seq).limit(BATCH)).all()
        return [
            (ChangeEvent(seq=seq, at=instant(at), action=action, subject=subject, run=run), study)
            for seq, at, action, subject, run, study in rows
        ]

    def _read_leases(self) -> dict[tuple[str, str], tuple[float, int]]:
        """Return the latest end of a lease and the number of leases, which every heartbeat changes, by run and
        study."""
        query = select(TaskRow.run_id, RunRow.study, func.max(TaskRow.lease_expires_at), func.count())
        query = query.join(RunRow, RunRow.id == TaskRow.run_id).where(IS_LEASED)
        with self._database.snapshot() as session:
            rows = session.execute(query.group_by(TaskRow.run_id, RunRow.study))
            return {(run_id, study): (expires_at or 0.0, count) for run_id, study, expires_at, count in rows}
