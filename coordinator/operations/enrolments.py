"""Enrolments: a worker asks to be admitted, an administrator decides by a code, and no secret is handed over.

The shape is that of the device grant (RFC 8628): the worker shows a short code, waits, and asks again. Unlike there,
the secret is made at the worker, and its token will be known by a hash of it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, exists, select, update
from sqlalchemy.orm import Session

from tessera.coordinator.auth import tokens
from tessera.coordinator.db import audit, views
from tessera.coordinator.db.tables import AuditRow, EnrolmentRow, SiteRow, TokenRow, new_id
from tessera.coordinator.db.workers import create_site
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec, Rotated, Rotation
from tessera.shared.problems import Busy, Conflict, Fault, Forbidden, Invalid, NotFound, Unauthenticated
from tessera.shared.schema import Page
from tessera.shared.token_format import hash_of, normal_code
from tessera.shared.urls import networks_of

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""No vowels, so no words; no digits, which are taken for letters (RFC 8628, section 6.1)."""

CODE_LETTERS = 8
"""20^8 = 2.6e10 codes: among a hundred that wait, a mistyped one is another's once in 250 million times."""

PENDING_SECONDS = 900.0

KEPT_SECONDS = 86_400.0
"""How long a worker may ask what became of it."""

ADDRESS_SHARE = 10
"""One address, and one /64 of IPv6, may have a tenth of what may wait, so that it does not keep all others out."""

SHARE_MARGIN = 2
"""By how many places a network has to be ahead of another to make way for it: of two with one each, none does."""

FULL_SECONDS = 60.0


def ask(services: Services, spec: EnrolmentSpec, address: str, secret: str | None) -> Enrolment:
    """Ask for a worker to be admitted: by an administrator, or at once if `secret` is that of an enrolment token.

    The same hash again is the same request.
    """
    services.admission.count_enrolment(address)
    try:
        with services.database.transaction() as session:
            now = services.database.now()
            row = _asked_before(session, now, spec)
            if row is None and secret is not None:
                caller = tokens.authenticate(session, now, secret)
                if caller.role != "enrolment":
                    raise Forbidden(f"this needs an enrolment token, or none; yours has role {caller.role}")
                row = _redeem(session, now, spec, caller, address)
            if row is None:
                row = _wait(session, now, spec, address, services.settings.pending_enrolments)
            return views.enrolment_view(row, now)
    except Unauthenticated:
        services.admission.count_failure(address)
        raise


def get_enrolment(services: Services, enrolment_id: str, address: str, secret: str) -> Enrolment:
    """Return an enrolment to the holder of the secret that it was made for. Raise NotFound to any other."""
    with services.database.snapshot() as session:
        row = session.get(EnrolmentRow, enrolment_id)
        if row is None or not secrets.compare_digest(row.secret_hash, hash_of(secret)):
            services.admission.count_failure(address)
            raise NotFound(f"there is no enrolment {enrolment_id} with this secret")
        view = views.enrolment_view(row, services.database.now())
    services.admission.count_request(view.id)
    return view


def list_enrolments(
    services: Services, limit: int, cursor: str | None = None, code: str | None = None
) -> Page[Enrolment]:
    """Return a page of the workers that wait to be admitted, oldest first; with a `code`, of all that showed it."""
    now = services.database.now()
    waiting = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    with services.database.snapshot() as session:

        def view(row: Any) -> Enrolment:
            return views.enrolment_view(row[0], now, _decided_at(session, row[0]))

        query = select(EnrolmentRow).where(waiting if code is None else EnrolmentRow.code == normal_code(code))
        return views.page(session, query, (EnrolmentRow.created_at, EnrolmentRow.id), view, limit, cursor)


def approve(services: Services, caller: Principal, enrolment_id: str, approval: Approval) -> Enrolment:
    """Admit a worker: from now on its secret is a token of its site.

    Raise NotFound, Conflict, and Invalid for another worker's code or for a site that does not exist.
    """
    with services.database.transaction() as session:
        now, actor = services.database.now(), caller.actor
        row = _pending(session, now, enrolment_id)
        if normal_code(approval.code) != row.code:
            fault = Fault(pointer="/code", detail="is not the one that this worker shows")
            raise Invalid(
                "the code is another worker's", errors=[fault], remedy="Ask the worker's people for it again."
            )
        site = session.scalars(select(SiteRow).where(SiteRow.name == approval.site)).one_or_none()
        if site is None and not approval.create_site:
            fault = Fault(pointer="/site", detail=f"there is no site {approval.site!r}")
            raise Invalid("the site does not exist", errors=[fault], remedy="Set create_site to make it.")
        if site is None:
            site = create_site(session, now, actor, approval.site)
        _end(session, now, row, "approved", site.name)
        audit.record(session, now, actor, "enrolment.approve", row.id, **_told(row))
        _admit(session, now, actor, row, site)
        return views.enrolment_view(row, now)


def decline(services: Services, caller: Principal, enrolment_id: str) -> Enrolment:
    """Refuse to admit a worker. Raise NotFound and Conflict."""
    with services.database.transaction() as session:
        now = services.database.now()
        row = _pending(session, now, enrolment_id)
        _end(session, now, row, "declined", row.site)
        audit.record(session, now, caller.actor, "enrolment.decline", row.id, **_told(row))
        return views.enrolment_view(row, now)


def rotate(services: Services, caller: Principal, secret: str, rotation: Rotation) -> Rotated:
    """Give a site's token another secret; `secret`, the present one, is admitted for a while yet."""
    grace = services.settings.rotation_grace_seconds
    with services.database.transaction() as session:
        tokens.rotate_token(session, services.database.now(), caller, secret, rotation.secret_hash, grace)
    return Rotated(grace_seconds=grace)


def _wait(session: Session, now: float, spec: EnrolmentSpec, address: str, most: int) -> EnrolmentRow:
    """Record that a worker asks to be admitted, once for each secret.

    Nothing is audited: anybody may ask, and asking alone has no effect. Where all places are taken, the latest
    from the network with the most of them makes way. Raise Busy if too many wait all the same.
    """
    if spec.site is None:
        fault = Fault(pointer="/site", detail="without an enrolment token, the worker says of which site it is")
        raise Invalid("the worker names no site", errors=[fault])
    waiting = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    order = (EnrolmentRow.created_at, EnrolmentRow.id)
    there = session.execute(select(EnrolmentRow.id, EnrolmentRow.address).where(waiting).order_by(*order)).all()
    taken = Counter(networks_of(row.address)[0] for row in there)
    full = Busy("too many workers wait to be admitted (setting pending_enrolments)", retry_after_seconds=FULL_SECONDS)
    if taken[networks_of(address)[0]] >= max(1, most // ADDRESS_SHARE):
        raise full
    if len(there) >= most:
        if (leaving := makes_way([(row.id, row.address) for row in there], address)) is None:
            raise full
        session.execute(update(EnrolmentRow).where(EnrolmentRow.id == leaving).values(state="expired"))
    # What waited for too long gives its code and its secret free.
    late = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at <= now)
    session.execute(update(EnrolmentRow).where(late).values(state="expired"))
    return _added(session, now, spec, spec.site, address, "pending")


def makes_way(waiting: Sequence[tuple[str, str]], address: str) -> str | None:
    """Return which of those that wait leaves its place to one from `address`.

    `waiting` has their ids and addresses, the latest last. None if no network has so many more places than this one.
    """
    taken = Counter(networks_of(other)[-1] for _, other in waiting)
    network, most = taken.most_common(1)[0]
    if most < taken[networks_of(address)[-1]] + SHARE_MARGIN:
        return None
    return next(id_ for id_, other in reversed(waiting) if networks_of(other)[-1] == network)


def _asked_before(session: Session, now: float, spec: EnrolmentSpec) -> EnrolmentRow | None:
    """Return what this very secret asked for, if it waits or was admitted: only the answer was lost.

    Raise Conflict if the secret is a token's that was not asked for so.
    """
    rows = session.scalars(
        select(EnrolmentRow)
        .where(EnrolmentRow.secret_hash == spec.secret_hash)
        .order_by(EnrolmentRow.created_at.desc())
    )
    token = (TokenRow.secret_hash == spec.secret_hash) & TokenRow.revoked_at.is_(None)
    admitted = session.scalar(select(exists().where(token)))
    for row in rows:
        if (row.state == "approved" and admitted) or (row.state == "pending" and row.expires_at > now):
            return row
    if tokens.is_known(session, spec.secret_hash):
        raise Conflict(
            "a token with this secret was issued before",
            remedy="If it is still valid there is nothing to join; else remove the file that holds it and join anew.",
        )
    return None


def _redeem(session: Session, now: float, spec: EnrolmentSpec, caller: Principal, address: str) -> EnrolmentRow:
    """Admit a worker that shows an enrolment token, which is used up by it.

    Raise Unauthenticated if another was faster, and Invalid if the worker names another site.
    """
    site = session.get_one(SiteRow, caller.site_id)
    if spec.site not in (None, site.name):
        fault = Fault(pointer="/site", detail=f"the enrolment token is of site {site.name}")
        raise Invalid("the worker names another site than its enrolment token", errors=[fault])
    left = (TokenRow.id == caller.token_id) & (TokenRow.uses_left > 0)
    used = update(TokenRow).where(left).values(uses_left=TokenRow.uses_left - 1)
    if session.execute(used.execution_options(synchronize_session=False)).rowcount != 1:  # type: ignore[attr-defined]
        raise Unauthenticated("this enrolment token was used up", remedy="Ask an administrator for another.")
    row = _added(session, now, spec, site.name, address, "approved")
    audit.record(session, now, caller.actor, "enrolment.redeem", row.id, **_told(row))
    _admit(session, now, caller.actor, row, site)
    return row


def _decided_at(session: Session, row: EnrolmentRow) -> float | None:
    """Return when it was admitted or declined, by the audit."""
    if row.state not in ("approved", "declined"):
        return None
    return session.scalar(select(AuditRow.at).where(AuditRow.subject == row.id).limit(1))


def _pending(session: Session, now: float, enrolment_id: str) -> EnrolmentRow:
    row = session.get(EnrolmentRow, enrolment_id)
    if row is None:
        raise NotFound(f"there is no enrolment {enrolment_id}")
    if row.state != "pending" or row.expires_at <= now:
        state = row.state if row.state != "pending" else "expired"
        raise Conflict(f"the enrolment is {state}, which is final", remedy="Have the worker join again.")
    return row


def _end(session: Session, now: float, row: EnrolmentRow, state: str, site: str) -> None:
    still = (EnrolmentRow.id == row.id) & (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    ended = update(EnrolmentRow).where(still).values(state=state, site=site)
    if session.execute(ended.execution_options(synchronize_session=False)).rowcount != 1:  # type: ignore[attr-defined]
        raise Conflict("somebody else decided about this enrolment meanwhile")
    session.refresh(row)


def _admit(session: Session, now: float, actor: str, row: EnrolmentRow, site: SiteRow) -> None:
    """Issue the token whose secret the worker has made."""
    if tokens.is_known(session, row.secret_hash):
        raise Conflict("a token with this secret was issued meanwhile")
    name = f"{site.name}.{row.worker}"[:64]
    token = TokenRow(
        id=new_id(), name=name, role="site", secret_hash=row.secret_hash, site_id=site.id, created_at=now
    )
    session.add(token)
    audit.record(
        session, now, actor, "token.issue", token.id, name=name, role="site", site=site.name, enrolment=row.id
    )


def _added(session: Session, now: float, spec: EnrolmentSpec, site: str, address: str, state: str) -> EnrolmentRow:
    """Add a row, in place of those that nobody may ask about any more."""
    session.execute(delete(EnrolmentRow).where(EnrolmentRow.expires_at < now - KEPT_SECONDS))
    row = EnrolmentRow(
        id=new_id(),
        code=_free_code(session),
        secret_hash=spec.secret_hash,
        state=state,
        site=site,
        worker=spec.worker,
        device=spec.device,
        version=spec.version,
        address=address,
        created_at=now,
        expires_at=now + PENDING_SECONDS,
    )
    session.add(row)
    session.flush()
    return row


def _free_code(session: Session) -> str:
    """Return a code that no waiting enrolment has."""
    while True:
        code = normal_code("".join(secrets.choice(LETTERS) for _ in range(CODE_LETTERS)))
        taken = (EnrolmentRow.code == code) & (EnrolmentRow.state == "pending")
        if not session.scalar(select(exists().where(taken))):
            return code


def _told(row: EnrolmentRow) -> dict[str, str]:
    return {"site": row.site, "worker": row.worker, "device": row.device, "address": row.address}
