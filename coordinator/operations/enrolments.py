"""Enrolments: a worker requests to be admitted, and an administrator decides by a code. No secret is transferred.

As in the device grant (RFC 8628), the worker shows a short code and polls. Unlike there, the worker creates the
secret, and the coordinator stores a hash of it.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, exists, select, update
from sqlalchemy.orm import Session

from tessera.coordinator.auth import tokens
from tessera.coordinator.db import audit, views
from tessera.coordinator.db.tables import AuditRow, EnrolmentRow, SiteRow, TokenRow, find, new_id
from tessera.coordinator.db.workers import create_site, no_site, require_silent
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec
from tessera.shared.api.token_format import hash_of, normal_code
from tessera.shared.problems import Busy, Conflict, Fault, Forbidden, Invalid, NotFound, Unauthenticated
from tessera.shared.schema import Page
from tessera.shared.urls import networks_of

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""No vowels, which could form words, and no digits, which resemble letters (RFC 8628, section 6.1)."""

CODE_LETTERS = 8
"""20^8 = 2.6e10 codes: with a hundred pending, a mistyped code is another one's once in 250 million times."""

PENDING_SECONDS = 900.0

KEPT_SECONDS = 86_400.0
"""Time for which a worker may read its enrolment."""

ADDRESS_SHARE = 10
"""An address, or a /64 of IPv6, may have a tenth of the pending enrolments, so that it cannot exclude all others."""

SHARE_MARGIN = 2
"""Places by which a network must exceed another to lose one to it; networks with one each are equal."""

FULL_SECONDS = 60.0


def ask(services: Services, spec: EnrolmentSpec, address: str, secret: str | None) -> Enrolment:
    """Request a worker's enrolment: by an administrator, or at once if `secret` is that of an enrolment token.

    Repeating the request with the same hash returns the same enrolment, which a token approves if it is pending.
    """
    with services.database.transaction() as session:
        now, liveness = services.database.now(), services.settings.liveness_seconds
        row = _asked_before(session, now, spec)
        if secret is not None and (row is None or row.state == "pending"):
            caller = tokens.authenticate(session, now, secret)
            services.last_seen.note_use(caller.token_id, now)
            if caller.role != "enrolment":
                raise Forbidden(f"this needs an enrolment token, or none; yours has role {caller.role}")
            row = _redeem(session, now, spec, caller, address, row, liveness)
        if row is None:
            row = _wait(session, now, spec, address, services.settings.pending_enrolments)
        return views.enrolment_view(row, now)


def get_enrolment(services: Services, enrolment_id: str, secret: str) -> Enrolment:
    """Return an enrolment to the holder of its secret. Raise NotFound to any other caller."""
    with services.database.snapshot() as session:
        row = session.get(EnrolmentRow, enrolment_id)
        if row is None or not secrets.compare_digest(row.secret_hash, hash_of(secret)):
            raise NotFound(f"there is no enrolment {enrolment_id} with this secret")
        view = views.enrolment_view(row, services.database.now())
    services.admission.count_request(view.id)
    return view


def list_enrolments(
    services: Services, limit: int, cursor: str | None = None, code: str | None = None
) -> Page[Enrolment]:
    """Return a page of pending enrolments, oldest first; with a `code`, all enrolments that have it."""
    now = services.database.now()
    waiting = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    with services.database.snapshot() as session:

        def view(row: Any) -> Enrolment:
            return views.enrolment_view(row[0], now, _decided_at(session, row[0]))

        query = select(EnrolmentRow).where(waiting if code is None else EnrolmentRow.code == normal_code(code))
        return views.page(session, query, (EnrolmentRow.created_at, EnrolmentRow.id), view, limit, cursor)


def approve(services: Services, caller: Principal, enrolment_id: str, approval: Approval) -> Enrolment:
    """Make a worker's secret a token of its site. Raise NotFound, Conflict, or Invalid for a wrong code or site."""
    with services.database.transaction() as session:
        now, actor = services.database.now(), caller.actor
        row = _pending(session, now, enrolment_id)
        if normal_code(approval.code) != row.code:
            fault = Fault(pointer="/code", detail="is not the code that this worker shows")
            raise Invalid("the code is wrong", errors=[fault], remedy="Ask the worker's people for it again.")
        site = session.scalars(select(SiteRow).where(SiteRow.name == approval.site)).one_or_none()
        if site is None and not approval.create_site:
            fault = no_site(session, approval.site)
            raise Invalid("the site does not exist", errors=[fault], remedy="Set create_site to create it.")
        if site is None:
            site = create_site(session, now, actor, approval.site, approval.studies)
        _end(session, now, row, "approved", site.name)
        audit.record(session, now, actor, "enrolment.approve", row.id, **_told(session, row))
        _admit(session, now, actor, row, site, services.settings.liveness_seconds)
        return views.enrolment_view(row, now)


def decline(services: Services, caller: Principal, enrolment_id: str) -> Enrolment:
    """Refuse to admit a worker. Raise NotFound and Conflict."""
    with services.database.transaction() as session:
        now = services.database.now()
        row = _pending(session, now, enrolment_id)
        _end(session, now, row, "declined", row.site)
        audit.record(session, now, caller.actor, "enrolment.decline", row.id, **_told(session, row))
        return views.enrolment_view(row, now)


def _wait(session: Session, now: float, spec: EnrolmentSpec, address: str, most: int) -> EnrolmentRow:
    """Add a pending enrolment.

    It is not audited, because every caller may request one and it has no effect. If all places are taken, the latest
    enrolment of the network with the most of them expires. Raise Busy if that does not free a place.
    """
    if spec.site is None:
        fault = Fault(pointer="/site", detail="is required without an enrolment token")
        raise Invalid("the worker names no site", errors=[fault])
    waiting = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    order = (EnrolmentRow.created_at, EnrolmentRow.id)
    pending = session.execute(select(EnrolmentRow.id, EnrolmentRow.address).where(waiting).order_by(*order)).all()
    taken = Counter(networks_of(row.address)[0] for row in pending)
    full = Busy("too many enrolments are pending (setting pending_enrolments)", retry_after_seconds=FULL_SECONDS)
    if taken[networks_of(address)[0]] >= max(1, most // ADDRESS_SHARE):
        raise full
    if len(pending) >= most:
        if (evicted := makes_way([(row.id, row.address) for row in pending], address)) is None:
            raise full
        session.execute(update(EnrolmentRow).where(EnrolmentRow.id == evicted).values(state="expired"))
    # Expired ones free their codes and secrets.
    late = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at <= now)
    session.execute(update(EnrolmentRow).where(late).values(state="expired"))
    return _added(session, now, spec, spec.site, address, "pending")


def makes_way(waiting: Sequence[tuple[str, str]], address: str) -> str | None:
    """Return the pending enrolment that loses its place to one from `address`.

    `waiting` has ids and addresses, the latest last. None if no network exceeds this one by `SHARE_MARGIN` places.
    """
    taken = Counter(networks_of(other)[-1] for _, other in waiting)
    network, most = taken.most_common(1)[0]
    if most < taken[networks_of(address)[-1]] + SHARE_MARGIN:
        return None
    return next(id_ for id_, other in reversed(waiting) if networks_of(other)[-1] == network)


def _asked_before(session: Session, now: float, spec: EnrolmentSpec) -> EnrolmentRow | None:
    """Return the secret's pending or approved enrolment: its response was lost. Raise Conflict for another's."""
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
            remedy="If the token is valid, the worker is enrolled; otherwise remove the file with it and join again.",
        )
    return None


def _redeem(
    session: Session,
    now: float,
    spec: EnrolmentSpec,
    caller: Principal,
    address: str,
    waiting: EnrolmentRow | None,
    liveness_seconds: float,
) -> EnrolmentRow:
    """Admit a worker, or one that is `waiting`, by an enrolment token.

    Raise Unauthenticated if it is used up, Invalid for another site, NameInUse while a worker of its name is live.
    """
    site = session.get_one(SiteRow, caller.site_id)
    if spec.site not in (None, site.name):
        fault = Fault(pointer="/site", detail=f"the enrolment token is of site {site.name}")
        raise Invalid("the worker names another site than its enrolment token", errors=[fault])
    left = (TokenRow.id == caller.token_id) & (TokenRow.uses_left > 0)
    used = update(TokenRow).where(left).values(uses_left=TokenRow.uses_left - 1)
    if session.execute(used.execution_options(synchronize_session=False)).rowcount != 1:  # type: ignore[attr-defined]
        raise Unauthenticated("this enrolment token was used up", remedy="Ask an administrator for another.")
    if waiting:
        _end(session, now, waiting, "approved", site.name)
    row = waiting or _added(session, now, spec, site.name, address, "approved")
    audit.record(session, now, caller.actor, "enrolment.redeem", row.id, **_told(session, row))
    _admit(session, now, caller.actor, row, site, liveness_seconds)
    return row


def _decided_at(session: Session, row: EnrolmentRow) -> float | None:
    """Return the instant of its approval or decline, from the audit chain."""
    if row.state not in ("approved", "declined"):
        return None
    return session.scalar(select(AuditRow.at).where(AuditRow.subject == row.id).limit(1))


def _pending(session: Session, now: float, enrolment_id: str) -> EnrolmentRow:
    row = find(session, EnrolmentRow, enrolment_id)
    if row.state != "pending" or row.expires_at <= now:
        state = row.state if row.state != "pending" else "expired"
        raise Conflict(f"the enrolment is {state}, which is final", remedy="Have the worker join again.")
    return row


def _end(session: Session, now: float, row: EnrolmentRow, state: str, site: str) -> None:
    still = (EnrolmentRow.id == row.id) & (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    ended = update(EnrolmentRow).where(still).values(state=state, site=site)
    if session.execute(ended.execution_options(synchronize_session=False)).rowcount != 1:  # type: ignore[attr-defined]
        raise Conflict("this enrolment was approved, declined or expired meanwhile")
    session.refresh(row)


def _admit(
    session: Session, now: float, actor: str, row: EnrolmentRow, site: SiteRow, liveness_seconds: float
) -> None:
    """Issue the token whose secret the worker created. Raise NameInUse while another worker of its name is live."""
    require_silent(session, now, site.id, row.worker, liveness_seconds)
    if tokens.is_known(session, row.secret_hash):
        raise Conflict("a token with this secret was issued meanwhile")
    # Another worker of this name may have joined before, for example this one before it lost its token.
    name = tokens.free_name(session, now, f"{site.name}.{row.worker}")
    token = TokenRow(
        id=new_id(), name=name, role="site", secret_hash=row.secret_hash, site_id=site.id, created_at=now
    )
    session.add(token)
    about = {"name": audit.pseudonym_of(session, site.name, name), "role": "site", "site": site.name}
    audit.record(session, now, actor, "token.issue", token.id, **about, enrolment=row.id)


def _added(session: Session, now: float, spec: EnrolmentSpec, site: str, address: str, state: str) -> EnrolmentRow:
    """Add a row, and delete rows past their time."""
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


def _told(session: Session, row: EnrolmentRow) -> dict[str, str]:
    worker, address = (audit.pseudonym_of(session, row.site, what) for what in (row.worker, row.address))
    return {"site": row.site, "worker": worker, "device": row.device, "address": address}
