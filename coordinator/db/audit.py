"""The audit chain: every change of state, in the transaction that makes it (invariant I15).

Entries are never rewritten, so they name sites by pseudonyms under a key for each site. A reader finds the names
through the keys; without a site's key, its pseudonym stands for no name.
"""

import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

from sqlalchemy import bindparam, insert, select
from sqlalchemy.orm import Session

from tessera.coordinator.db.engine import insert_missing
from tessera.coordinator.db.tables import AuditKeyRow, AuditRow, EnrolmentRow, SiteRow, TokenRow, WorkerRow
from tessera.shared.api.audit_chain import GENESIS, link, mapped

_HEAD = "audit_head"
UNAUDITED = "unaudited"
"""The key of `Session.info` that keeps a session from writing entries: a simulation's would have no reader."""
_ENTER = insert(AuditRow)
_LAST = select(AuditRow.seq, AuditRow.digest).order_by(AuditRow.seq.desc()).limit(1)
_KEYS = select(AuditKeyRow.name, AuditKeyRow.key)
_KEYS_OF = _KEYS.where(AuditKeyRow.name.in_(bindparam("names", expanding=True)))
MAX_NAMES = 500
"""Words of an entry that are looked up; of more, the keys of all sites are read."""
_LABEL = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
# Digests and ids are no names, and most entries have no other words.
_WORD = re.compile(f"sha256:[0-9a-f]{{64}}|[0-9a-f]{{64}}|[0-9a-f]{{32}}|({_LABEL})(/{_LABEL})?")
_COVERED = ("seq", "at", "actor", "action", "subject", "run_id", "detail")


def record(
    session: Session, now: float, actor: str, action: str, subject: str, *, run_id: str | None = None, **detail: Any
) -> None:
    """Append an entry whose digest covers its content and the previous entry.

    Each site's name that stands as a word in the detail is replaced by the site's pseudonym.
    """
    session.flush()
    if session.info.get(UNAUDITED):
        return
    detail = _pseudonymous(session, detail)
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


def _pseudonymous(session: Session, detail: dict[str, Any]) -> dict[str, Any]:
    """Return an entry's detail with pseudonyms in place of the names of sites and of their workers."""
    words = set[str]()

    def read(text: str) -> str:
        words.update(name for match in _WORD.finditer(text) for name in _names(match))
        return text

    mapped(read, detail)
    if not words:
        return detail
    query = (_KEYS_OF, {"names": sorted(words)}) if len(words) <= MAX_NAMES else (_KEYS,)
    if not (keys := dict(session.connection().execute(*query).all())):
        return detail

    def replaced(match: re.Match[str]) -> str:
        for name in _names(match):
            if key := keys.get(name):
                worker = (match[2] or "").rstrip(".")
                rest = match[0].removeprefix(name).removeprefix(worker)
                return pseudonym(key, worker[1:] or None) + rest
        return match[0]

    found: dict[str, Any] = mapped(partial(_WORD.sub, replaced), detail)
    return found


def _names(match: re.Match[str]) -> Iterator[str]:
    """Yield the names that a word may be: as it stands, and without the full stop of a sentence."""
    if match[1]:
        yield match[1]
    if match[1] and not match[2] and match[1].endswith("."):
        yield match[1].rstrip(".")


def pseudonym(key: bytes, what: str | None = None) -> str:
    """Return the pseudonym of a site, or of something of the site, such as a worker's name."""
    site = f"site-{hmac.digest(key, b'site', 'sha256').hex()[:16]}"
    return site if what is None else f"{site}/{hmac.digest(key, f'of {what}'.encode(), 'sha256').hex()[:12]}"


def reserve(session: Session, names: Iterable[str]) -> None:
    """Give each name of a site a key, unless it has one: entries name it by a pseudonym from now on."""
    rows = [{"name": name, "key": secrets.token_bytes(32)} for name in sorted(set(names))]
    if rows:
        insert_missing(session, AuditKeyRow, rows)


def pseudonym_of(session: Session, site: str, what: str | None = None) -> str:
    """Return the pseudonym of a site by its name, or of something of the site."""
    reserve(session, [site])
    return pseudonym(session.scalars(select(AuditKeyRow.key).where(AuditKeyRow.name == site)).one(), what)


def names_of(session: Session) -> dict[str, str]:
    """Return the name behind each pseudonym of a site that has not withdrawn, and of its workers, tokens and
    addresses."""
    keys = dict(session.execute(_KEYS).all())
    found = {pseudonym(key): name for name, key in keys.items()}
    enrolled = select(EnrolmentRow.site, EnrolmentRow.worker), select(EnrolmentRow.site, EnrolmentRow.address)
    of_sites = (select(SiteRow.name, row.name).join(row, row.site_id == SiteRow.id) for row in (WorkerRow, TokenRow))
    for query in (*of_sites, *enrolled):
        for site, what in session.execute(query):
            if key := keys.get(site):
                found[pseudonym(key, what)] = f"{site}/{what}"
    return found


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
