"""The audit chain: every change of state, in the transaction that makes it (invariant I15)."""

from contextlib import closing
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import AuditRow
from tessera.shared.api.audit_chain import GENESIS, link

_HEAD = "audit_head"
_ENTER = insert(AuditRow)
_LAST = select(AuditRow.seq, AuditRow.digest).order_by(AuditRow.seq.desc()).limit(1)
_COVERED = ("seq", "at", "actor", "action", "subject", "run_id", "detail")


def record(
    session: Session, now: float, actor: str, action: str, subject: str, *, run_id: str | None = None, **detail: Any
) -> None:
    """Append an entry whose digest covers its content and the previous entry."""
    session.flush()
    last, previous = _head(session)
    entry = {
        "seq": last + 1,
        # Whole microseconds, as the API shows: a reader of the chain can verify it.
        "at": round(now, 6),
        "actor": actor,
        "action": action,
        "subject": subject,
        "run_id": run_id,
        "detail": detail,
    }
    digest = link(previous, entry)
    session.connection().execute(_ENTER, {**entry, "previous": previous, "digest": digest})
    session.info[_HEAD] = (session.get_transaction(), last + 1, digest)


def _head(session: Session) -> tuple[int, str]:
    """Return the last entry's number and digest, which a transaction reads once: it is the only writer."""
    transaction, last, digest = session.info.get(_HEAD, (None, 0, GENESIS))
    if transaction is not None and transaction is session.get_transaction():
        return last, digest
    row = session.connection().execute(_LAST).first()
    return (row.seq, row.digest) if row else (0, GENESIS)


def creator_of(session: Session, run_id: str) -> str | None:
    """Return the name of the token that created a run, from its first entry."""
    first = select(AuditRow.actor, AuditRow.action).where(AuditRow.run_id == run_id).order_by(AuditRow.seq).limit(1)
    row = session.execute(first).first()
    return row.actor.partition(":")[2] if row and row.action == "run.create" else None


def broken_at(session: Session) -> int | None:
    """Return the number of the first entry that differs from the chained one, or None if the chain holds.

    It cannot detect entries missing at the end; a copy of the last digest kept elsewhere can.
    """
    digest = GENESIS
    # A few at a time: details may be long.
    with closing(session.scalars(select(AuditRow).order_by(AuditRow.seq).execution_options(yield_per=20))) as rows:
        for number, row in enumerate(rows, start=1):
            entry = {name: getattr(row, name) for name in _COVERED}
            if (row.seq, row.previous, row.digest) != (number, digest, link(digest, entry)):
                return number
            digest = row.digest
    return None
