"""Sites and their tokens, as administrators manage them."""

from tessera.coordinator.auth import sessions, tokens
from tessera.coordinator.db import audit, views, workers
from tessera.coordinator.db.tables import SiteRow, find
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations.idempotency import once
from tessera.coordinator.services import Services
from tessera.shared.api.admin import IssuedToken, RotationResult, Site, SiteSpec, Token, TokenSpec
from tessera.shared.problems import Conflict


def create_site(services: Services, caller: Principal, spec: SiteSpec, key: str | None = None) -> Site:
    """Create a site. With a `key`, repeating the request returns the same site. Raise Conflict if its name is
    taken."""
    with services.database.transaction() as session:
        now = services.database.now()

        def create() -> Site:
            return views.view_of(Site, workers.create_site(session, now, caller.actor, spec.name, spec.studies))

        return once(session, now, caller, key, spec, Site, create)


def set_suspended(services: Services, caller: Principal, site_id: str, *, suspended: bool) -> Site:
    """Refuse all tokens of a site from now on, and end its sessions and waiting claims; or accept its tokens again.
    Repeating it changes nothing. Raise NotFound."""
    with services.database.transaction() as session:
        now, row = services.database.now(), find(session, SiteRow, site_id)
        if row.withdrawn_at is not None:
            raise Conflict(f"site {row.name} has withdrawn, which is final", remedy="Create a site for it.")
        if suspended != (row.suspended_at is not None):
            row.suspended_at = now if suspended else None
            action = "site.suspend" if suspended else "site.resume"
            audit.record(session, now, caller.actor, action, row.id, name=row.name)
            sessions.end_of_site(session, site_id)
        site, waiting = views.view_of(Site, row), workers.workers_of(session, site_id)
    services.wake_workers(waiting)
    return site


def issue_token(services: Services, caller: Principal, spec: TokenSpec, key: str | None = None) -> IssuedToken:
    """Issue a token. Its secret is in this result only and is not stored.

    Raise Invalid if its site does not exist, and Conflict if a valid token has its name or a token was issued under
    this key before.
    """
    secret: str | None = None
    with services.database.transaction() as session:
        now = services.database.now()

        def create() -> Token:
            nonlocal secret
            tokens.require_free_name(session, now, spec.name)
            row, secret = tokens.issue_token(session, now, caller.actor, spec)
            return views.token_view(row, spec.site)

        token = once(session, now, caller, key, spec, Token, create)
    if secret is None:
        raise Conflict(
            f"token {token.id} was issued under this key before, and its secret was in that response",
            remedy="If the secret was lost, revoke the token and issue another under a new key.",
        )
    return IssuedToken(**token.model_dump(), secret=secret)


def rotate_token(
    services: Services, caller: Principal, token_id: str, secret_hash: str, shown: str | None = None
) -> RotationResult:
    """Replace a token's secret; the present one, which its holder has `shown`, stays valid for a while.

    Raise NotFound and Conflict.
    """
    grace = services.settings.rotation_grace_seconds
    with services.database.transaction() as session:
        tokens.rotate_token(session, services.database.now(), caller.actor, token_id, secret_hash, grace, shown)
    return RotationResult(grace_seconds=grace)


def revoke_token(services: Services, caller: Principal, token_id: str) -> None:
    """Revoke a token at once, and end the claims that wait with it. Raise NotFound and Conflict."""
    with services.database.transaction() as session:
        now, admins_sign_in = services.database.now(), "admin" in services.settings.oidc_roles.values()
        row = tokens.revoke_token(session, now, caller.actor, token_id, admins_sign_in=admins_sign_in)
        waiting = workers.workers_of(session, row.site_id)
    services.wake_workers(waiting)
