"""Who is who: tokens, sites and workers."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from dataclasses import dataclass

from sqlalchemy import Float, String, bindparam, exists, or_, select, update
from sqlalchemy.orm import Session

from coordinator.storage import audit
from coordinator.storage.tables import SiteRow, TokenRow, WorkerRow
from shared.problems import Conflict, Fault, Invalid, NotFound, Unauthenticated
from shared.wire import Claim, TokenRole, TokenSpec

TOKEN_BYTES = 32

DECLARED = {"kinds", "datasets", "held_out", "methods", "device", "resources", "mirror", "withheld"}
"""What is kept of a claim: all that tells which tasks the worker may have."""


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Principal:
    """Who calls: the holder of a token."""

    token_id: str
    name: str
    role: TokenRole
    site_id: str | None

    @property
    def owner(self) -> str:
        """Whose uploads and idempotency keys these are. A site's workers share theirs."""
        return f"site:{self.site_id}" if self.site_id else f"token:{self.token_id}"

    @property
    def actor(self) -> str:
        """What the audit chain calls this caller."""
        return f"{self.role}:{self.name}"


def authenticate(session: Session, now: float, secret: str) -> Principal:
    """Raises Unauthenticated."""
    row = session.scalars(select(TokenRow).where(TokenRow.secret_hash == _hash(secret))).one_or_none()
    if row is None:
        raise Unauthenticated("this token is not known here")
    return principal_of(row, now)


def principal_of(row: TokenRow, now: float) -> Principal:
    """Raises Unauthenticated for a token that was revoked or has expired."""
    if row.revoked_at is not None:
        raise Unauthenticated("this token was revoked")
    if row.expires_at is not None and row.expires_at <= now:
        raise Unauthenticated("this token has expired")
    # The role was checked when the token was issued.
    return Principal(row.id, row.name, row.role, row.site_id)  # type: ignore[arg-type]


def still_valid(session: Session, now: float, token_id: str) -> bool:
    row = session.get_one(TokenRow, token_id)
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now)


def issue_token(session: Session, now: float, actor: str, spec: TokenSpec) -> tuple[TokenRow, str]:
    """A new token and its secret, which is kept nowhere. Raises Invalid if its site does not exist."""
    site = None
    if spec.site is not None:
        site = session.scalars(select(SiteRow).where(SiteRow.name == spec.site)).one_or_none()
        if site is None:
            fault = Fault(pointer="/site", detail=f"there is no site {spec.site!r}")
            raise Invalid("the token's site does not exist", errors=[fault], remedy="Create the site first.")
    secret = f"tessera_{spec.role}_{secrets.token_urlsafe(TOKEN_BYTES)}"
    row = TokenRow(
        id=new_id(),
        name=spec.name,
        role=spec.role,
        secret_hash=_hash(secret),
        site_id=site.id if site else None,
        created_at=now,
        expires_at=now + spec.expires_in_days * 86400 if spec.expires_in_days else None,
    )
    session.add(row)
    audit.record(session, now, actor, "token.issue", row.id, name=spec.name, role=spec.role, site=spec.site)
    return row, secret


def revoke_token(session: Session, now: float, actor: str, token_id: str) -> None:
    """Raises NotFound. Revoking again changes nothing."""
    row = session.get(TokenRow, token_id)
    if row is None:
        raise NotFound(f"there is no token {token_id}")
    if row.revoked_at is None:
        row.revoked_at = now
        audit.record(session, now, actor, "token.revoke", token_id)


def first_token(session: Session, now: float) -> str | None:
    """The secret of a first admin token if there has never been one, else None."""
    if session.scalar(select(exists().where(TokenRow.role == "admin"))):
        return None
    return issue_token(session, now, "coordinator", TokenSpec(name="first-admin", role="admin"))[1]


def create_site(session: Session, now: float, actor: str, name: str) -> SiteRow:
    """Raises Conflict if there is one of that name."""
    if session.scalar(select(exists().where(SiteRow.name == name))):
        raise Conflict(f"there is a site {name!r} already", remedy="Use it, or choose another name.")
    row = SiteRow(id=new_id(), name=name, created_at=now)
    session.add(row)
    audit.record(session, now, actor, "site.create", row.id, name=name)
    return row


def enrolled(session: Session, site_id: str, claim: Claim) -> str | None:
    """The id of the claiming worker if it is known and has declared nothing new."""
    row = _worker(session, site_id, claim.worker)
    return row.id if row and row.declared == _declared(claim) else None


def enrol(session: Session, now: float, site_id: str, claim: Claim) -> str:
    """Enters what a worker says of itself and returns its id."""
    row = _worker(session, site_id, claim.worker)
    if row is None:
        row = WorkerRow(id=new_id(), site_id=site_id, name=claim.worker, created_at=now)
        session.add(row)
    row.declared = _declared(claim)
    row.last_seen_at = now
    audit.record(session, now, f"site:{site_id}", "worker.enrol", row.id, declared=row.declared)
    return row.id


def note_seen(session: Session, seen: dict[str, float]) -> None:
    """Enters when workers were last heard of."""
    if not seen:
        return
    worker, at = bindparam("worker", type_=String), bindparam("at", type_=Float)
    later = or_(WorkerRow.last_seen_at < at, WorkerRow.last_seen_at.is_(None))
    # Once for all on the connection: through the session, each worker would cost a statement of its own to make.
    session.connection().execute(
        update(WorkerRow).where(WorkerRow.id == worker, later).values(last_seen_at=at),
        [{"worker": worker_id, "at": when} for worker_id, when in seen.items()],
    )


def _worker(session: Session, site_id: str, name: str) -> WorkerRow | None:
    which = (WorkerRow.site_id == site_id) & (WorkerRow.name == name)
    return session.scalars(select(WorkerRow).where(which)).one_or_none()


def _declared(claim: Claim) -> dict[str, object]:
    return claim.model_dump(mode="json", include=DECLARED)


def _hash(secret: str) -> str:
    # A plain hash is enough for 256 random bits: there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()
