"""Dependencies of handlers: authentication, permitted roles, and common parameters."""

from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
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


STRANGERS_BYTES = 64 << 10
FEW, SOME, MANY = 256, 8_192, 1 << 17
"""Values that a body may have: without a token; with one; as the settings of a run."""


class Gate:
    """A dependency that states who may call its route, and how large a body may be. `BoundedRoute` asks it before it
    reads any of the body. This one admits all callers."""

    def __init__(
        self, most_bytes: int | None = STRANGERS_BYTES, most_values: int = FEW, remedy: str | None = None
    ) -> None:
        """Without `most_bytes` the setting max_body_bytes alone limits a body. `remedy` is for larger ones."""
        self.most_bytes, self.most_values, self.remedy = most_bytes, most_values, remedy

    def check(self, document: Any) -> None:
        """Check a parsed body before anything of it is validated. Raises Problem."""

    async def admit(self, request: Request) -> Principal | None:
        """Return the caller, if it is known, who is `request.state.caller` from then on."""
        return None

    def refused(self, request: Request) -> None:
        """Take note that a request was refused."""


class Callers(Gate):
    """Admits holders of tokens of these roles."""

    def __init__(
        self, *roles: TokenRole, most_bytes: int | None = None, most_values: int = SOME, remedy: str | None = None
    ) -> None:
        super().__init__(most_bytes, most_values, remedy)
        self._roles = roles

    async def __call__(self, request: Request, _: Shown) -> Principal:
        caller: Principal = request.state.caller
        return caller

    async def admit(self, request: Request) -> Principal:
        """Return the caller. Raises Unauthenticated, Forbidden, SiteSuspended and TooManyRequests."""
        serving, shown = await services(request), await bearer(request)
        try:
            # Without a token there is nothing to look up, and no thread to wait for.
            caller = await run_in_threadpool(holder, serving, shown) if shown else holder(serving, None)
        except Unauthenticated:
            serving.admission.count_failure(address_of(request))
            raise
        serving.admission.count_request(caller.token_id)
        serving.last_seen.note_use(caller.token_id, serving.database.now())
        require_role(caller, *self._roles)
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


Viewer = Annotated[Principal, Depends(Callers("viewer", "orchestrator", "admin"))]
Orchestrator = Annotated[Principal, Depends(Callers("orchestrator", "admin"))]
Admin = Annotated[Principal, Depends(Callers("admin"))]
SiteCaller = Annotated[Principal, Depends(Callers("site"))]
Anyone = Annotated[Principal, Depends(Callers("site", "viewer", "orchestrator", "admin"))]
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
