"""Who is signed in to the page. A session is bound to the token that it was begun with, and ends with it."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from sqlalchemy import delete
from sqlalchemy.orm import Session

from coordinator.storage import audit
from coordinator.storage.identity import Principal, holder_of
from coordinator.storage.tables import SessionRow
from shared.problems import Unauthenticated
from shared.tokens import hash_of

SECRET_BYTES = 32


def begin(session: Session, now: float, caller: Principal, seconds: float) -> str:
    """A new session's secret, of which only a hash is kept. Those that have expired are removed by the way."""
    session.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
    secret = secrets.token_urlsafe(SECRET_BYTES)
    row = SessionRow(id=hash_of(secret), token_id=caller.token_id, created_at=now, expires_at=now + seconds)
    session.add(row)
    audit.record(session, now, caller.actor, "session.begin", caller.token_id)
    return secret


def holder(session: Session, now: float, secret: str) -> Principal:
    """Who holds the session, with what the token may at this moment. Raises Unauthenticated."""
    found = session.get(SessionRow, hash_of(secret))
    if found is None:
        raise Unauthenticated("you are not signed in here, or signed out")
    if found.expires_at <= now:
        raise Unauthenticated("the session has expired")
    return holder_of(session, now, found.token_id)


def end(session: Session, now: float, caller: Principal, secret: str) -> None:
    """Ends a session at once. Ending it again changes nothing."""
    ended = session.execute(delete(SessionRow).where(SessionRow.id == hash_of(secret)).returning(SessionRow.id)).all()
    if ended:
        audit.record(session, now, caller.actor, "session.end", caller.token_id)


def form_token(secret: str) -> str:
    """What each form of a session carries, and no other site can know."""
    return hmac.new(secret.encode(), b"form", hashlib.sha256).hexdigest()
