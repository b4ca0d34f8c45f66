"""Who is who: tokens, sites and workers."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Float, Row, String, Text, bindparam, cast, exists, func, or_, select, update
from sqlalchemy.orm import Session

from coordinator.storage import audit
from coordinator.storage.tables import SiteRow, TokenRow, WorkerRow, declared_text
from shared.problems import Conflict, Fault, Invalid, NotFound, QuotaExceeded, SiteSuspended, Unauthenticated
from shared.tensors import digest_of
from shared.tokens import hash_of, new_secret
from shared.wire import MOST_CLAIM_BYTES, Claim, TokenRole, TokenSpec

DECLARED = {"kinds", "datasets", "held_out", "methods", "device", "version", "resources", "mirror", "withheld"}
"""What is kept of a claim: all that tells which tasks the worker may have, and what it runs on."""

FORGOTTEN_SECONDS = 30 * 86_400.0
"""How long a name counts among those of a site after it was heard of last: some sites name each process anew."""

DECLARED_SHARE = 4_096
"""Bytes that each worker of a site may declare on average: those that are live are kept parsed."""

TOO_MANY_SECONDS = 600.0
"""When a site with too many workers may ask again."""

SUSPENDED_SECONDS = 30.0
"""How long the workers of a suspended site are sent away for at a time."""


def new_id() -> str:
    return uuid.uuid4().hex


ANOTHER = "Ask an administrator for another."
ANEW = "A worker removes the file that holds it and joins anew: tessera worker join URL --site NAME."

PERSON = "person:"


@dataclass(frozen=True)
class Principal:
    """Who calls: the holder of a token, or a person whom the OpenID provider vouches for."""

    token_id: str
    name: str
    role: TokenRole
    site_id: str | None

    @property
    def owner(self) -> str:
        """Whose uploads and idempotency keys these are. A site's workers share theirs."""
        return f"site:{self.site_id}" if self.site_id else f"token:{self.token_id}"

    @classmethod
    def person(cls, name: str, role: TokenRole) -> Principal:
        return cls(PERSON + name, name, role, None)

    @property
    def is_person(self) -> bool:
        return self.token_id.startswith(PERSON)

    @property
    def actor(self) -> str:
        """What the audit chain calls this caller."""
        return f"{self.role}:{self.name}"


def authenticate(session: Session, now: float, secret: str) -> Principal:
    """Who holds this token. Raises Unauthenticated, and SiteSuspended."""
    shown = hash_of(secret)
    found = _token(session, TokenRow.secret_hash == shown)
    if found is None:
        # A running worker reads its file anew only when the secret that it knows is refused.
        replaced = (TokenRow.previous_hash == shown) & (TokenRow.previous_until > now)
        found = _token(session, replaced)
    return _admitted(found, now)


def require_admitted(session: Session, now: float, caller: Principal) -> None:
    """Raises Unauthenticated or SiteSuspended if the caller, who was admitted before, no longer is."""
    holder_of(session, now, caller.token_id)


def holder_of(session: Session, now: float, token_id: str) -> Principal:
    """Who holds the token of this id. Raises Unauthenticated and SiteSuspended."""
    return _admitted(_token(session, TokenRow.id == token_id), now)


def _token(session: Session, which: ColumnElement[bool]) -> Row[TokenRow, SiteRow] | None:
    query = select(TokenRow, SiteRow).outerjoin(SiteRow, SiteRow.id == TokenRow.site_id)
    return session.execute(query.where(which)).one_or_none()


def _admitted(found: Row[TokenRow, SiteRow] | None, now: float) -> Principal:
    if found is None:
        raise Unauthenticated("this token is not known here", remedy=f"{ANOTHER} {ANEW}")
    token: TokenRow = found[0]
    remedy = f"{ANOTHER} {ANEW}" if token.role == "site" else ANOTHER
    # An outer join's.
    site: SiteRow | None = found[1]
    if token.revoked_at is not None:
        raise Unauthenticated("this token was revoked", remedy=remedy)
    if token.expires_at is not None and token.expires_at <= now:
        raise Unauthenticated("this token has expired", remedy=remedy)
    if token.uses_left == 0:
        raise Unauthenticated("this enrolment token was used up", remedy=ANOTHER)
    if site is not None and site.suspended_at is not None:
        raise SiteSuspended(f"site {site.name} is suspended", retry_after_seconds=SUSPENDED_SECONDS)
    # The role was checked when the token was issued.
    return Principal(token.id, token.name, token.role, token.site_id)  # type: ignore[arg-type]


def issue_token(session: Session, now: float, actor: str, spec: TokenSpec) -> tuple[TokenRow, str]:
    """A new token and its secret, which is kept nowhere. Raises Invalid if its site does not exist."""
    site = None
    if spec.site is not None:
        site = session.scalars(select(SiteRow).where(SiteRow.name == spec.site)).one_or_none()
        if site is None:
            fault = Fault(pointer="/site", detail=f"there is no site {spec.site!r}")
            raise Invalid("the token's site does not exist", errors=[fault], remedy="Create the site first.")
    secret = new_secret(spec.role)
    row = TokenRow(
        id=new_id(),
        name=spec.name,
        role=spec.role,
        secret_hash=hash_of(secret),
        site_id=site.id if site else None,
        created_at=now,
        expires_at=now + spec.expires_in_days * 86400 if spec.expires_in_days else None,
        uses_left=spec.uses,
    )
    session.add(row)
    audit.record(session, now, actor, "token.issue", row.id, name=spec.name, role=spec.role, site=spec.site)
    return row, secret


def revoke_token(
    session: Session, now: float, actor: str, token_id: str, *, admins_sign_in: bool = False
) -> TokenRow:
    """Revoke a token. Revoking again changes nothing.

    Raises NotFound, and Conflict for the last token of an administrator unless `admins_sign_in` elsewhere.
    """
    row = session.get(TokenRow, token_id)
    if row is None:
        raise NotFound(f"there is no token {token_id}")
    if row.revoked_at is None:
        if row.role == "admin" and not admins_sign_in and not _other_admin(session, now, token_id):
            raise Conflict(
                "this is the last token of an administrator that is valid",
                remedy="Issue another first, with `tessera admin token issue`.",
            )
        row.revoked_at = now
        audit.record(session, now, actor, "token.revoke", token_id)
    return row


def _other_admin(session: Session, now: float, token_id: str) -> bool:
    """Tell whether another token of an administrator is valid."""
    valid = TokenRow.revoked_at.is_(None) & (TokenRow.expires_at.is_(None) | (TokenRow.expires_at > now))
    other = (TokenRow.role == "admin") & (TokenRow.id != token_id)
    return bool(session.scalar(select(exists().where(other, valid))))


def rotate_token(session: Session, now: float, caller: Principal, shown: str, fresh_hash: str, grace: float) -> None:
    """Gives the caller's token another secret, of which this is the hash; the one that was `shown` is admitted for
    `grace` seconds more. A repeat changes nothing. Raises Conflict."""
    row = session.get_one(TokenRow, caller.token_id)
    if row.secret_hash == fresh_hash:
        return
    if row.secret_hash != hash_of(shown):
        raise Conflict(
            "this secret was replaced already, by another", remedy="Use the secret that it was replaced by."
        )
    if is_known(session, fresh_hash):
        raise Conflict("this secret is or was another token's", remedy="Make another.")
    row.previous_hash, row.previous_until, row.secret_hash = row.secret_hash, now + grace, fresh_hash
    audit.record(session, now, caller.actor, "token.rotate", row.id, name=row.name)


def is_known(session: Session, secret_hash: str) -> bool:
    """Whether this is or was the secret of any token."""
    either = (TokenRow.secret_hash == secret_hash) | (TokenRow.previous_hash == secret_hash)
    return bool(session.scalar(select(exists().where(either))))


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


def suspend_site(session: Session, now: float, actor: str, site_id: str) -> SiteRow:
    """From now on none of the site's tokens is admitted. Raises NotFound. To do it again changes nothing."""
    row = find_site(session, site_id)
    if row.suspended_at is None:
        row.suspended_at = now
        audit.record(session, now, actor, "site.suspend", row.id, name=row.name)
    return row


def resume_site(session: Session, now: float, actor: str, site_id: str) -> SiteRow:
    """Raises NotFound. To do it again changes nothing."""
    row = find_site(session, site_id)
    if row.suspended_at is not None:
        row.suspended_at = None
        audit.record(session, now, actor, "site.resume", row.id, name=row.name)
    return row


def find_site(session: Session, site_id: str) -> SiteRow:
    """Raises NotFound."""
    row = session.get(SiteRow, site_id)
    if row is None:
        raise NotFound(f"there is no site {site_id}")
    return row


def workers_of(session: Session, site_id: str | None) -> list[str]:
    """The ids of a site's workers."""
    return list(session.scalars(select(WorkerRow.id).where(WorkerRow.site_id == site_id)))


def enrolled(session: Session, site_id: str, claim: Claim) -> str | None:
    """The id of the claiming worker if it is known and has declared nothing new."""
    row = _worker(session, site_id, claim.worker)
    # A digest without what it is of was left by an earlier version, which knows of no digests.
    same = row and row.declared == (told := _declared(claim)) and row.declared_digest == digest_of(_text(told))
    return row.id if row and same else None


def enrol(session: Session, now: float, site_id: str, claim: Claim, most_workers: int) -> tuple[str, int]:
    """Enters what a worker says of itself; its id, and how many bytes that takes.

    Raises QuotaExceeded for one name too many, and if all workers of the site together say too much.
    """
    told = _declared(claim)
    length = len(_text(told))
    row = _worker(session, site_id, claim.worker)
    others = (WorkerRow.site_id == site_id) & (WorkerRow.name != claim.worker)
    others &= WorkerRow.last_seen_at >= now - FORGOTTEN_SECONDS
    names, declared = session.execute(
        select(func.count(), func.coalesce(func.sum(func.length(cast(WorkerRow.declared, Text))), 0)).where(others)
    ).one()
    if row is None and names >= most_workers:
        raise QuotaExceeded(
            f"{names} workers of this site were heard of within {FORGOTTEN_SECONDS / 86400:g} days "
            "(setting max_workers_per_site)",
            remedy="Use the names of workers that there are, or have an administrator allow more.",
            retry_after_seconds=TOO_MANY_SECONDS,
        )
    # One may say more than its share, and all of them together not.
    if declared + length > (most := max(most_workers * DECLARED_SHARE, MOST_CLAIM_BYTES)):
        raise QuotaExceeded(
            f"the workers of this site declare {declared} bytes, and {length} more would be over {most} "
            f"({DECLARED_SHARE} for each of max_workers_per_site)",
            remedy="Shorten what their policies list.",
            retry_after_seconds=TOO_MANY_SECONDS,
        )
    if row is None:
        row = WorkerRow(id=new_id(), site_id=site_id, name=claim.worker, created_at=now)
        session.add(row)
    row.declared = told
    row.last_seen_at = now
    # The chain is kept for good, and what a worker says of itself may be long.
    audit.record(session, now, f"site:{site_id}", "worker.enrol", row.id, declared=row.declared_digest)
    return row.id, length


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


def _declared(claim: Claim) -> dict[str, Any]:
    return claim.model_dump(mode="json", include=DECLARED)


def _text(declared: dict[str, Any]) -> bytes:
    return declared_text(declared).encode()
