"""The audit, sent entry by entry to a sink outside: in order, and at least once.

The number of the last entry that the sink acknowledged is stored after each batch. A process that dies in between
sends the batch again, and readers drop repeats by the entries' numbers. One conductor at a time sends.
"""

import threading
from dataclasses import dataclass, field

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.audit_sinks import AuditSink
from tessera.coordinator.db import views
from tessera.coordinator.db.engine import DATABASE_AWAY, Database, log_away
from tessera.coordinator.db.tables import AUDIT_SINK, AuditRow, NoticeRow
from tessera.shared.api.admin import AuditEntry
from tessera.shared.client.notice_channels import Undelivered

LOOK_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
BATCH = 50

log = structlog.get_logger()


@dataclass(frozen=True)
class Backlog:
    """The entries that a sink has not acknowledged."""

    first: int
    """The number of the oldest of them."""
    since: float
    """The time at which it was written, in seconds since 1970."""
    reason: str
    """The reason of the last failed attempt; empty if the last one succeeded."""


def backlog(session: Session, url: str) -> Backlog | None:
    """Return the entries that the sink lacks, or None if it has all."""
    seq, reason = _cursor(session, url)
    since = session.scalar(select(AuditRow.at).where(AuditRow.seq == seq + 1))
    return None if since is None else Backlog(seq + 1, since, reason)


def _cursor(session: Session, url: str) -> tuple[int, str]:
    """Return the number of the last acknowledged entry and the reason of the last failure; a new sink gets all."""
    row = session.get(NoticeRow, (AUDIT_SINK, url))
    return (row.content["seq"], row.content["reason"]) if row else (0, "")


@dataclass(eq=False)
class AuditShipper:
    """Sends the audit to a sink, in a thread beside the conductor."""

    database: Database
    url: str
    sink: AuditSink
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._work, name="audit", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        pause = LOOK_SECONDS
        while not self._ended.wait(pause):
            try:
                self.ship()
                pause = LOOK_SECONDS
            except Undelivered as fault:
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                log.warning("audit.not_sent", sink=self.url, reason=str(fault), again_in_seconds=pause)
            except DATABASE_AWAY as fault:
                log_away(fault)
            except Exception:  # the next look may do better
                log.exception("audit.failed", sink=self.url)

    def ship(self) -> None:
        """Send all entries that the sink lacks. Raise Undelivered."""
        if not self._next():
            return
        with self.database.alone("sending the audit") as alone:
            while alone and not self._ended.is_set() and (entries := self._next()):
                try:
                    self.sink.send(entries)
                except Undelivered as fault:
                    self._store(entries[0].seq - 1, str(fault))
                    raise
                self._store(entries[-1].seq, "")

    def _next(self) -> list[AuditEntry]:
        with self.database.snapshot() as session:
            after = AuditRow.seq > _cursor(session, self.url)[0]
            return [
                views.audit_view(row)
                for row in session.scalars(select(AuditRow).where(after).order_by(AuditRow.seq).limit(BATCH))
            ]

    def _store(self, seq: int, reason: str) -> None:
        with self.database.transaction() as session:
            row = session.get(NoticeRow, (AUDIT_SINK, self.url))
            if row is None:
                row = NoticeRow(channel=AUDIT_SINK, key=self.url, content={"seq": 0}, seen_at=0.0, attempts=0)
                session.add(row)
            # Another conductor may have been faster.
            row.content = {"seq": max(seq, row.content["seq"]), "reason": reason}
