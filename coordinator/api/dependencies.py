"""Dependencies of handlers: authentication, permitted roles, and common parameters."""

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


# Asynchronous because FastAPI runs every other dependency in a thread, at every request.
async def services(request: Request) -> Services:
    serving: Services = request.app.state.services
    return serving


Serving = Annotated[Services, Depends(services)]


Shown = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


def principal(request: Request, serving: Serving, shown: Shown) -> Principal:
    """Return the caller. Raises Unauthenticated and TooManyRequests."""
    try:
        caller = holder(serving, shown)
    except Unauthenticated:
        serving.admission.count_failure(address_of(request))
        raise
    serving.admission.count_request(caller.token_id)
    serving.last_seen.note_use(caller.token_id, serving.database.now())
    return caller


def address_of(request: Request) -> str:
    """Return the peer's address."""
    return request.client.host if request.client else ""


def holder(serving: Services, credentials: HTTPAuthorizationCredentials | None) -> Principal:
    """Return the holder of the credentials. Raises Unauthenticated, Forbidden and SiteSuspended."""
    if credentials is None:
        raise Unauthenticated("the request carries no bearer token", headers={"WWW-Authenticate": "Bearer"})
    token = credentials.credentials
    # An OpenID provider's token has three parts, and a coordinator's this prefix.
    if serving.people and token.count(".") == 2 and not token.startswith("tessera_"):
        return serving.people.principal(token)
    with serving.database.snapshot() as session:
        return authenticate(session, serving.database.now(), token)


def require_role(caller: Principal, *roles: TokenRole) -> None:
    """Raise Forbidden."""
    if caller.role not in roles:
        raise Forbidden(f"this needs a token of role {' or '.join(roles)}; yours has role {caller.role}")


def allow(*roles: TokenRole) -> Callable[[Principal], Awaitable[Principal]]:
    """Return a dependency that admits callers of these roles."""

    async def admitted(caller: Annotated[Principal, Depends(principal)]) -> Principal:
        require_role(caller, *roles)
        return caller

    return admitted


Viewer = Annotated[Principal, Depends(allow("viewer", "orchestrator", "admin"))]
Orchestrator = Annotated[Principal, Depends(allow("orchestrator", "admin"))]
Admin = Annotated[Principal, Depends(allow("admin"))]
SiteCaller = Annotated[Principal, Depends(allow("site"))]
Anyone = Annotated[Principal, Depends(allow("site", "viewer", "orchestrator", "admin"))]
"""All callers but holders of enrolment tokens."""

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=128,
        description="Idempotency key: repeating the request with it returns the first response.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=500, description="maximum number of items to return")]
Cursor = Annotated[str | None, Query(max_length=512, description="next_cursor of the previous page")]
