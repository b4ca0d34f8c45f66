"""One notice of each condition that needs a person, by each channel.

Every serving process looks. The first that sees a condition inserts the notice's row; one at a time claims a row that
is due by writing when the next attempt is, which stands if it dies while it sends. So a notice is sent at least once,
and again only if a process dies or the receiver's answer is lost.
"""

import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from tessera.coordinator.alerts.attention import Alert
from tessera.coordinator.db.engine import DATABASE_AWAY, Database, log_away
from tessera.coordinator.db.tables import NoticeRow
from tessera.shared.client.notice_channels import Channel, Undelivered

EVERY_SECONDS = 15.0

RETRY_SECONDS = (120.0, 600.0, 1_800.0, 7_200.0)
"""Delays after failed attempts. Each is longer than an attempt takes, so that no other process repeats one in
progress."""

FORGET_SECONDS = 3_600.0
"""Time after which a condition that has gone is forgotten: if it returns sooner, it is the same one."""

log = structlog.get_logger()


@dataclass(eq=False)
class Notifier:
    """Sends notices by one channel, in a thread of each process that serves."""

    database: Database
    alerts: Callable[[Session, float], Iterable[Alert]]
    channel: Channel
    page_url: str
    settling_seconds: float
    """Time after the start during which workers may not have called again."""
    sent: int = 0
    failed: int = 0
    """Notices that were given up after the last attempt."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._work, name=self.channel.name, daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        pause = self.settling_seconds
        while not self._ended.wait(pause):
            pause = EVERY_SECONDS
            try:
                self.look()
            except DATABASE_AWAY as fault:
                log_away(fault)
            except Exception:  # the next look may do better
                log.exception("notices.failed", channel=self.channel.name)

    def look(self) -> None:
        """Record the conditions that are there now, and send what is due, until a notice is not taken."""
        self._record()
        while not self._ended.is_set() and self._send():
            pass

    def notice(self, alert: Alert) -> dict[str, str]:
        """Return the notice of an alert, without its detail: no text or figure of a worker goes outside."""
        at = datetime.fromtimestamp(self.database.now(), UTC).isoformat(timespec="seconds")
        about = {"code": alert.code, "title": alert.title, "link": self.page_url + alert.link}
        return {"id": uuid.uuid4().hex, "at": at, **about}

    def _record(self) -> None:
        now, channel = self.database.now(), self.channel.name
        with self.database.snapshot() as session:
            present = {f"{alert.code}/{alert.key}": alert for alert in self.alerts(session, now)}
        with self.database.transaction() as session:
            known = {row.key: row for row in session.scalars(select(NoticeRow).where(NoticeRow.channel == channel))}
            for row in known.values():
                # The clock may have been set back.
                row.seen_at = min(row.seen_at, now)
                if row.due_at is not None:
                    row.due_at = min(row.due_at, now + RETRY_SECONDS[-1])
                passed = row.seen_at < now - FORGET_SECONDS if row.due_at is None else not row.attempts
                if row.key in present:
                    row.seen_at = now
                elif passed:
                    session.delete(row)
            for key in present.keys() - known.keys():
                content, due_at = self.notice(present[key]), now + present[key].lasting_seconds
                row = NoticeRow(channel=channel, key=key, content=content, seen_at=now, attempts=0, due_at=due_at)
                session.add(row)

    def _send(self) -> bool:
        """Send the notice that is due first, if any; return True if it was taken."""
        now, own = self.database.now(), NoticeRow.channel == self.channel.name
        due = select(NoticeRow).where(own, NoticeRow.due_at <= now).order_by(NoticeRow.due_at, NoticeRow.key)
        with self.database.transaction() as session:
            row = session.scalars(due.limit(1)).first()
            if row is None:
                return False
            is_last = row.attempts == len(RETRY_SECONDS)
            row.due_at = None if is_last else now + RETRY_SECONDS[row.attempts]
            row.attempts += 1
            key, notice, attempt = row.key, row.content, row.attempts
        about = {"channel": self.channel.name, "code": notice["code"], "notice": notice["id"], "attempt": attempt}
        try:
            self.channel.send(notice, now)
        except Undelivered as fault:
            log.warning("notice.given_up" if is_last else "notice.not_sent", **about, reason=str(fault))
            self.failed += is_last
            return False
        with self.database.transaction() as session:
            session.execute(update(NoticeRow).where(own, NoticeRow.key == key).values(due_at=None))
        log.info("notice.sent", **about)
        self.sent += 1
        return True
