"""Who may call what, and what a handler is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from tessera.coordinator.auth.tokens import authenticate
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.problems import Forbidden, Unauthenticated
from tessera.shared.schema import TokenRole

bearer = HTTPBearer(
    auto_error=False, description="A token that an administrator issued, or one of the OpenID provider's."
)


# Asynchronous because it waits for nothing: FastAPI takes any other dependency to a thread, at every request.
async def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


Serving = Annotated[Services, Depends(services)]


def principal(
    request: Request, serving: Serving, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Principal:
    """Return the caller. Raises Unauthenticated and TooManyRequests."""
    try:
        caller = holder(serving, credentials)
    except Unauthenticated:
        serving.admission.count_failure(address_of(request))
        raise
    serving.admission.count_request(caller.token_id)
    return caller


def address_of(request: Request) -> str:
    """Return the peer's."""
    return request.client.host if request.client else ""


def holder(serving: Services, credentials: HTTPAuthorizationCredentials | None) -> Principal:
    """Return who shows this. Raises Unauthenticated, Forbidden and SiteSuspended."""
    if credentials is None:
        raise Unauthenticated("the request carries no bearer token", headers={"WWW-Authenticate": "Bearer"})
    if serving.people and is_signed(credentials.credentials):
        return serving.people.principal(credentials.credentials)
    with serving.database.snapshot() as session:
        return authenticate(session, serving.database.now(), credentials.credentials)


def is_signed(token: str) -> bool:
    """Return whether a bearer token is of the form that OpenID providers issue, and not one of our own."""
    return token.count(".") == 2 and not token.startswith("tessera_")


def allow(*roles: TokenRole) -> Callable[[Principal], Awaitable[Principal]]:
    """Return a dependency that admits these roles. Administrators are admitted to all but what only a site can do."""

    async def admitted(caller: Annotated[Principal, Depends(principal)]) -> Principal:
        if caller.role not in roles:
            raise Forbidden(f"this needs a token of role {' or '.join(roles)}; yours has role {caller.role}")
        return caller

    return admitted


Viewer = Annotated[Principal, Depends(allow("viewer", "orchestrator", "admin"))]
Orchestrator = Annotated[Principal, Depends(allow("orchestrator", "admin"))]
Admin = Annotated[Principal, Depends(allow("admin"))]
SiteCaller = Annotated[Principal, Depends(allow("site"))]
Anyone = Annotated[Principal, Depends(allow("site", "viewer", "orchestrator", "admin"))]
"""Whoever is admitted: an enrolment token's holder is not yet."""

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=128,
        description="Names this wish: the same key again gives the first answer.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=500, description="the most items to return")]
Cursor = Annotated[str | None, Query(max_length=512, description="the next_cursor of the page before")]
