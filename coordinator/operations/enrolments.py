"""Enrolments: a worker asks to be admitted, an administrator approves or declines, a site rotates its token."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from tessera.coordinator.auth import enrolment, tokens
from tessera.coordinator.db import views
from tessera.coordinator.db.tables import EnrolmentRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec, Rotated, Rotation
from tessera.shared.problems import Forbidden, NotFound, Unauthenticated
from tessera.shared.schema import Page
from tessera.shared.token_format import normal_code


def ask(services: Services, spec: EnrolmentSpec, address: str, secret: str | None) -> Enrolment:
    """Ask for a worker to be admitted: by an administrator, or at once if `secret` is that of an enrolment token.

    The same hash again is the same request.
    """
    services.admission.enrols(address)
    try:
        with services.database.transaction() as session:
            now = services.database.now()
            row = enrolment.asked_before(session, now, spec)
            if row is None and secret is not None:
                caller = tokens.authenticate(session, now, secret)
                if caller.role != "enrolment":
                    raise Forbidden(f"this needs an enrolment token, or none; yours has role {caller.role}")
                row = enrolment.redeem(session, now, spec, caller, address)
            if row is None:
                row = enrolment.ask(session, now, spec, address, services.settings.pending_enrolments)
            return views.enrolment_view(row, now)
    except Unauthenticated:
        services.admission.failed(address)
        raise


def get_enrolment(services: Services, enrolment_id: str, address: str, secret: str) -> Enrolment:
    """Return an enrolment to the holder of the secret that it was made for. Raise NotFound to any other."""
    try:
        with services.database.snapshot() as session:
            row = enrolment.shown_to(session, enrolment_id, secret)
            view = views.enrolment_view(row, services.database.now())
    except NotFound:
        services.admission.failed(address)
        raise
    services.admission.asked(row.id)
    return view


def list_enrolments(
    services: Services, limit: int, cursor: str | None = None, code: str | None = None
) -> Page[Enrolment]:
    """Return a page of the workers that wait to be admitted, oldest first; with a `code`, of all that showed it."""
    now = services.database.now()
    waiting = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    with services.database.snapshot() as session:

        def view(row: Any) -> Enrolment:
            return views.enrolment_view(row[0], now, enrolment.decided_at(session, row[0]))

        query = select(EnrolmentRow).where(waiting if code is None else EnrolmentRow.code == normal_code(code))
        return views.page(session, query, (EnrolmentRow.created_at, EnrolmentRow.id), view, limit, cursor)


def approve(services: Services, caller: Principal, enrolment_id: str, approval: Approval) -> Enrolment:
    """Admit a worker: from now on its secret is a token of its site."""
    with services.database.transaction() as session:
        now = services.database.now()
        return views.enrolment_view(enrolment.approve(session, now, caller.actor, enrolment_id, approval), now)


def decline(services: Services, caller: Principal, enrolment_id: str) -> Enrolment:
    """Refuse to admit a worker."""
    with services.database.transaction() as session:
        now = services.database.now()
        return views.enrolment_view(enrolment.decline(session, now, caller.actor, enrolment_id), now)


def rotate(services: Services, caller: Principal, secret: str, rotation: Rotation) -> Rotated:
    """Give a site's token another secret; `secret`, the present one, is admitted for a while yet."""
    grace = services.settings.rotation_grace_seconds
    with services.database.transaction() as session:
        tokens.rotate_token(session, services.database.now(), caller, secret, rotation.secret_hash, grace)
    return Rotated(grace_seconds=grace)
