"""Sessions of the dashboard. A session that was started with one of our tokens ends with the token; one that was
started at the OpenID provider ends when the settings name another provider."""

import hashlib
import hmac
import secrets

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from tessera.coordinator.auth.tokens import principal_for_token
from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import PersonSessionRow, SessionRow, TokenRow
from tessera.coordinator.domain.principal import Principal
from tessera.shared.api.token_format import hash_of
from tessera.shared.problems import Unauthenticated

MAX_SESSIONS = 32
"""Sessions of a token or a person at the same time; a further one ends the oldest."""


def begin(session: Session, now: float, caller: Principal, seconds: float) -> str:
    """Return a new session's secret, of which only a hash is stored. Delete expired sessions, and the caller's oldest
    ones beyond `MAX_SESSIONS`."""
    for table in (SessionRow, PersonSessionRow):
        session.execute(delete(table).where(table.expires_at <= now))
    _keep_latest(session, caller, MAX_SESSIONS - 1)
    secret = secrets.token_urlsafe(32)
    known = {"id": hash_of(secret), "created_at": now, "expires_at": now + seconds}
    if caller.is_person:
        session.add(PersonSessionRow(person=caller.name, role=caller.role, **known))
    else:
        session.add(SessionRow(token_id=caller.token_id, **known))
    audit.record(session, now, caller.actor, "session.begin", caller.token_id)
    return secret


def _keep_latest(session: Session, caller: Principal, most: int) -> None:
    table = PersonSessionRow if caller.is_person else SessionRow
    own = PersonSessionRow.person == caller.name if caller.is_person else SessionRow.token_id == caller.token_id
    latest = select(table.id).where(own).order_by(table.created_at.desc(), table.id).limit(most)
    session.execute(delete(table).where(own, table.id.not_in(latest)))


def holder(session: Session, now: float, secret: str, issuer: str | None) -> Principal:
    """Return a session's holder with the present role of its token, or the person's role at sign-in at `issuer`.

    Raise Unauthenticated."""
    shown = hash_of(secret)
    found = session.get(SessionRow, shown) or session.get(PersonSessionRow, shown)
    if found is None:
        raise Unauthenticated("you are not signed in here, or signed out")
    if found.expires_at <= now:
        raise Unauthenticated("the session has expired")
    if isinstance(found, SessionRow):
        return principal_for_token(session, now, found.token_id)
    if issuer is None or not found.person.startswith(f"{issuer}#"):
        raise Unauthenticated("people no longer sign in where this session was begun")
    # The role was one when the session began.
    return Principal.person(found.person, found.role)  # type: ignore[arg-type]


def end(session: Session, now: float, caller: Principal, secret: str) -> None:
    """End a session at once. Ending it again changes nothing."""
    ended = [
        session.execute(delete(table).where(table.id == hash_of(secret)).returning(table.id)).all()
        for table in (SessionRow, PersonSessionRow)
    ]
    if any(ended):
        audit.record(session, now, caller.actor, "session.end", caller.token_id)


def end_of_site(session: Session, site_id: str) -> None:
    """End the sessions that began with a site's tokens."""
    tokens = select(TokenRow.id).where(TokenRow.site_id == site_id)
    session.execute(delete(SessionRow).where(SessionRow.token_id.in_(tokens)))


def form_token(secret: str) -> str:
    """Return the value that each form of a session carries and that no other site knows."""
    return hmac.new(secret.encode(), b"form", hashlib.sha256).hexdigest()
