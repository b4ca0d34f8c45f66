"""Authentication by token."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Executable, exists, select
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit
from tessera.coordinator.db.studies import join
from tessera.coordinator.db.tables import AuditKeyRow, SiteRow, TokenRow, find, new_id
from tessera.coordinator.db.workers import no_site
from tessera.coordinator.domain.principal import Principal
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.problems import Conflict, Invalid, SiteSuspended, Unauthenticated
from tessera.shared.schema import DEFAULT_STUDY

SUSPENDED_SECONDS = 30.0
"""Retry-After of responses to workers of a suspended site."""

MAX_NAME = 64

ANOTHER = "Ask an administrator for another."
ANEW = "For a worker, delete the token's file and join again: tessera worker join URL --site NAME."


def authenticate(session: Session, now: float, secret: str) -> Principal:
    """Return the holder of a token. Raise Unauthenticated and SiteSuspended."""
    shown: dict[str, str | float] = {"shown": hash_of(secret), "now": now}
    # A running worker reads its file anew only when the secret that it knows is refused.
    return _admitted(session, (_BY_SECRET, _BY_PREVIOUS_SECRET), shown)


def principal_for_token(session: Session, now: float, token_id: str) -> Principal:
    """Return the holder of the token with this id. Raise Unauthenticated and SiteSuspended."""
    return _admitted(session, (_BY_ID,), {"id": token_id, "now": now})


# Every request asks: built once, and without rows for the session.
_TOKEN, _SITE, _KEY = TokenRow.__table__.c, SiteRow.__table__.c, AuditKeyRow.__table__.c
_TOKENS = select(
    *(_TOKEN.id, _TOKEN.name, _TOKEN.role, _TOKEN.site_id, _TOKEN.revoked_at, _TOKEN.expires_at, _TOKEN.uses_left),
    *(_SITE.name.label("site"), _SITE.suspended_at, _KEY.key),
).select_from(
    TokenRow.__table__.outerjoin(SiteRow.__table__, _SITE.id == _TOKEN.site_id).outerjoin(
        AuditKeyRow.__table__, _KEY.name == _SITE.name
    )
)
_BY_ID = _TOKENS.where(_TOKEN.id == given("id"))
_BY_SECRET = _TOKENS.where(_TOKEN.secret_hash == given("shown"))
_BY_PREVIOUS_SECRET = _TOKENS.where(_TOKEN.previous_hash == given("shown"), _TOKEN.previous_until > given("now"))


def _admitted(session: Session, queries: Sequence[Executable], shown: Mapping[str, str | float]) -> Principal:
    """Return the holder of the token that the first of these queries finds."""
    # A token that was changed in this session is found as it is now.
    session.flush()
    found = (session.connection().execute(query, shown).one_or_none() for query in queries)
    token = next((row for row in found if row), None)
    if token is None:
        raise Unauthenticated("this token is not known here", remedy=f"{ANOTHER} {ANEW}")
    remedy, now = f"{ANOTHER} {ANEW}" if token.role == "site" else ANOTHER, shown["now"]
    if token.revoked_at is not None:
        raise Unauthenticated("this token was revoked", remedy=remedy)
    if token.expires_at is not None and token.expires_at <= now:
        raise Unauthenticated("this token has expired", remedy=remedy)
    if token.uses_left == 0:
        raise Unauthenticated("this enrolment token was used up", remedy=ANOTHER)
    if token.suspended_at is not None:
        raise SiteSuspended(f"site {token.site} is suspended", retry_after_seconds=SUSPENDED_SECONDS)
    return Principal(token.id, token.name, token.role, token.site_id, token.key and audit.pseudonym(token.key))


def require_free_name(session: Session, now: float, name: str) -> None:
    """Raise Conflict if a valid token has this name, by which people revoke it."""
    if other := session.scalars(select(TokenRow).where(TokenRow.name == name, *_valid(now)).limit(1)).first():
        raise Conflict(
            f"a valid token of role {other.role} is named {name!r} already",
            remedy=f"Choose another name, or revoke that one first: `tessera admin token revoke {other.id}`.",
        )


def free_name(session: Session, now: float, wanted: str) -> str:
    """Return a name that no valid token has: the wanted one, or the beginning of it with a number."""
    kept = wanted[: MAX_NAME - 8]
    same = TokenRow.name.startswith(kept, autoescape=True)
    taken = set(session.scalars(select(TokenRow.name).where(same, *_valid(now))))
    numbered = (f"{kept}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted[:MAX_NAME]], numbered) if name not in taken)


def _valid(now: float) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions of a token that is neither revoked, nor expired, nor used up."""
    unexpired = TokenRow.expires_at.is_(None) | (TokenRow.expires_at > now)
    unused = TokenRow.uses_left.is_(None) | (TokenRow.uses_left > 0)
    return TokenRow.revoked_at.is_(None), unexpired, unused


def issue_token(session: Session, now: float, actor: str, spec: TokenSpec) -> tuple[TokenRow, str]:
    """Return a new token and its secret, which is not stored. Raise Invalid if its site or a study does not exist."""
    site = None
    if spec.site is not None:
        site = session.scalars(select(SiteRow).where(SiteRow.name == spec.site)).one_or_none()
        if site is None:
            fault = no_site(session, spec.site)
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
    shown = audit.pseudonym_of(session, spec.site, spec.name) if spec.site else spec.name
    about: dict[str, Any] = {"name": shown, "role": spec.role, "site": spec.site}
    if spec.role in ("orchestrator", "viewer"):
        studies = spec.studies or (DEFAULT_STUDY,)
        join(session, "token", row.id, studies)
        about["studies"] = [*studies]
    audit.record(session, now, actor, "token.issue", row.id, **about)
    return row, secret


def revoke_token(
    session: Session, now: float, actor: str, token_id: str, *, admins_sign_in: bool = False
) -> TokenRow:
    """Revoke a token. Raise NotFound, and Conflict for the last admin token unless `admins_sign_in` elsewhere."""
    row = find(session, TokenRow, token_id)
    if row.revoked_at is None:
        unexpired = TokenRow.expires_at.is_(None) | (TokenRow.expires_at > now)
        other = (TokenRow.role == "admin") & (TokenRow.id != token_id) & TokenRow.revoked_at.is_(None) & unexpired
        if row.role == "admin" and not admins_sign_in and not session.scalar(select(exists().where(other))):
            raise Conflict(
                f"{row.name!r} is the last valid token of an administrator",
                remedy="Create another first with `tessera admin token create NAME --role admin`.",
            )
        row.revoked_at = now
        audit.record(session, now, actor, "token.revoke", token_id)
    return row


def rotate_token(
    session: Session, now: float, actor: str, token_id: str, fresh_hash: str, grace: float, shown: str | None = None
) -> None:
    """Replace a token's secret; the present one, which a holder has `shown`, stays valid for `grace` seconds. Safe to
    repeat.

    Raise NotFound, and Conflict for a token or a shown secret that is not valid, and for a hash that is known.
    """
    row = find(session, TokenRow, token_id)
    if row.secret_hash == fresh_hash:
        return
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now) or row.uses_left == 0:
        raise Conflict(f"token {row.name!r} is not valid any more", remedy="Create another token.")
    if shown is not None and row.secret_hash != hash_of(shown):
        raise Conflict(
            "this secret was replaced already, by another", remedy="Use the secret that it was replaced by."
        )
    if is_known(session, fresh_hash):
        raise Conflict("this secret is or was another token's", remedy="Make another.")
    row.previous_hash, row.previous_until, row.secret_hash = row.secret_hash, now + grace, fresh_hash
    site = session.get(SiteRow, row.site_id) if row.site_id else None
    name = audit.pseudonym_of(session, site.name, row.name) if site else row.name
    audit.record(session, now, actor, "token.rotate", row.id, name=name)


def is_known(session: Session, secret_hash: str) -> bool:
    """Return True if this is or was the secret of any token."""
    either = (TokenRow.secret_hash == secret_hash) | (TokenRow.previous_hash == secret_hash)
    return bool(session.scalar(select(exists().where(either))))


def first_token(session: Session, now: float, *, admins_sign_in: bool = False) -> str | None:
    """Return the secret of a new admin token for one day; None if there is a valid one, or there has ever been one
    and `admins_sign_in` elsewhere."""
    if session.scalar(select(exists().where(TokenRow.role == "admin", *(() if admins_sign_in else _valid(now))))):
        return None
    spec = TokenSpec(name="first-admin", role="admin", expires_in_days=1)
    return issue_token(session, now, "coordinator", spec)[1]
