"""Sessions of the dashboard in cookies, and their protection against requests of other sites.

The cookie is sent to /page only, so that the API accepts nothing but bearer tokens.
"""

import base64
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from fastapi import Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse

from tessera.coordinator.api.dependencies import Gate, address_of, require_role
from tessera.coordinator.api.errors import faults_of_request
from tessera.coordinator.api.request_limits import BoundedRequest, BoundedRoute
from tessera.coordinator.auth import sessions
from tessera.coordinator.dashboard.security_headers import PREFIX, under
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.problems import (
    BadRequest,
    Forbidden,
    Invalid,
    NotFound,
    Problem,
    TooManyRequests,
    Unauthenticated,
)
from tessera.shared.schema import TokenRole
from tessera.shared.urls import is_loopback

COOKIE = "tessera_session"
SIGNING = "tessera_signing"
SIGNING_PATH = f"{PREFIX}/sign-in"
SIGNING_SECONDS = 600
THEME = "tessera_theme"
FORM_TOKEN = "form_token"  # noqa: S105 (its name)

MAX_FIELDS = 512

Theme = Literal["light", "dark", "system"]
STEERING: tuple[TokenRole, ...] = ("orchestrator", "admin")
READERS: tuple[TokenRole, ...] = ("viewer", *STEERING)
"""The roles that read all pages but a site's own ones."""


@dataclass(frozen=True)
class Visitor:
    """A signed-in person or holder of a token."""

    principal: Principal
    secret: str

    @property
    def form_token(self) -> str:
        return sessions.form_token(self.secret)

    @property
    def name(self) -> str:
        """The name to show: a person's name at the provider, without the provider."""
        return self.principal.name.rpartition("#")[2] if self.principal.is_person else self.principal.name

    @property
    def is_site(self) -> bool:
        return self.principal.role == "site"

    @property
    def steers(self) -> bool:
        return self.principal.role in STEERING

    @property
    def administers(self) -> bool:
        return self.principal.role == "admin"


class PageRoute(BoundedRoute):
    """A route whose problems are pages; without a session it redirects to the sign-in."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_problems(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as refusal:
                faults = faults_of_request(request, refusal)[:8]
                problem: Problem = Invalid("the address is invalid; see the errors", errors=faults)
            except Problem as refusal:
                problem = refusal
            try:
                if not getattr(request.state, "signed", False):
                    request.app.state.services.admission.count_anonymous(address_of(request))
            except TooManyRequests as refusal:
                problem = refusal
            if isinstance(problem, Unauthenticated):
                return to_sign_in(request)
            shown: Callable[[Request, Problem], Response] = request.app.state.show_problem
            return shown(request, problem)

        return handle_problems


def visitor(request: Request, serving: Services) -> Visitor:
    """Return the signed-in visitor. Raises Unauthenticated and TooManyRequests."""
    secret = request.cookies.get(COOKIE, "")
    if not secret:
        raise Unauthenticated("you are not signed in")
    try:
        principal = holder(serving, secret)
    except Unauthenticated:
        serving.admission.count_failure(address_of(request))
        raise
    request.state.signed = True
    serving.admission.count_request(principal.token_id)
    serving.last_seen.note_use(principal.token_id, serving.database.now())
    return Visitor(principal, secret)


class Visitors(Gate):
    """Admits signed-in visitors with one of these roles. To a site, other pages look like none."""

    def __init__(self, *roles: TokenRole) -> None:
        super().__init__(None)
        self._roles = roles

    async def __call__(self, request: Request) -> Visitor:
        who: Visitor = request.state.visitor
        return who

    async def admit(self, request: Request) -> Principal:
        """Return the visitor. Raises Unauthenticated, Forbidden, NotFound and TooManyRequests."""
        serving: Services = request.app.state.services
        # Without a session there is nothing to look up, and no thread to wait for.
        shown = request.cookies.get(COOKIE)
        who = await run_in_threadpool(visitor, request, serving) if shown else visitor(request, serving)
        request.state.visitor = who
        if who.is_site and "site" not in self._roles:
            raise no_page(request.scope["path"])
        require_role(who.principal, *self._roles)
        return who.principal


Signed = Annotated[Visitor, Depends(Visitors(*READERS))]
SignedSite = Annotated[Visitor, Depends(Visitors("site"))]
SignedOrSite = Annotated[Visitor, Depends(Visitors(*READERS, "site"))]


def no_page(path: str) -> NotFound:
    return NotFound(f"there is no page {path[:200]}", remedy="Go to the overview, and follow its links.")


def holder(serving: Services, secret: str) -> Principal:
    """Return the holder of a session. Raises Unauthenticated."""
    with serving.database.snapshot() as session:
        return sessions.holder(session, serving.database.now(), secret, serving.settings.oidc_issuer)


# ---------------------------------------------------------------- forms


async def form(request: BoundedRequest) -> dict[str, str]:
    """Return the fields of a form. Raises Forbidden if a page of another origin sent it."""
    require_same_origin(request)
    try:
        return await request.parsed(_fields)
    except ValueError:
        raise BadRequest("the form cannot be read") from None


def _fields(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=MAX_FIELDS))


Fields = Annotated[dict[str, str], Depends(form)]


class Senders(Visitors):
    """Admits the visitors whose session's pages have the form, by a token that no other page has."""

    async def __call__(self, request: Request, fields: Fields) -> Visitor:  # type: ignore[override]
        """Return the sender. Raises Forbidden."""
        who = await super().__call__(request)
        if not hmac.compare_digest(fields.get(FORM_TOKEN, "").encode(), who.form_token.encode()):
            raise Forbidden("the form does not belong to your session", remedy="Go back, reload the page and repeat.")
        return who


Sender = Annotated[Visitor, Depends(Senders(*READERS, "site"))]
SteeringSender = Annotated[Visitor, Depends(Senders(*STEERING))]
AdminSender = Annotated[Visitor, Depends(Senders("admin"))]


def require_same_origin(request: Request) -> None:
    """Raise Forbidden unless the browser reports that a page of this origin made the request."""
    site, same = request.headers.get("Sec-Fetch-Site"), False
    if site is not None:
        same = site == "same-origin"
    elif origin := request.headers.get("Origin"):
        # An invalid origin is not the same.
        with suppress(ValueError):
            same = urlsplit(origin).netloc == request.headers.get("Host")
    if not same:
        raise Forbidden(
            "the form was not sent by this dashboard", remedy="Open the dashboard and send the form there."
        )


# ---------------------------------------------------------------- cookies and redirects


def _is_local(request: Request) -> bool:
    """Return True if the browser is on this machine, judged by the host name that it uses."""
    try:
        return is_loopback(request.url.hostname or "")
    except ValueError:
        return False


def keep_session(request: Request, response: Response, secret: str, seconds: float) -> None:
    secure, age = not _is_local(request), int(seconds)
    response.set_cookie(COOKIE, secret, age, path=PREFIX, secure=secure, httponly=True, samesite="strict")


def keep_signing(request: Request, response: Response, secret: str, wanted: str) -> None:
    """Keep the sign-in's secret and the requested page while the browser is at the provider."""
    secure, age = not _is_local(request), SIGNING_SECONDS
    value = f"{secret}.{base64.urlsafe_b64encode(wanted.encode()).decode()}"
    # Lax, because the browser comes back from the provider's site.
    response.set_cookie(SIGNING, value, age, path=SIGNING_PATH, secure=secure, httponly=True, samesite="lax")


def signing(request: Request) -> tuple[str, str]:
    """Return the kept secret and the requested page."""
    secret, _, wanted = request.cookies.get(SIGNING, "").partition(".")
    try:
        return secret, own_path(base64.urlsafe_b64decode(wanted).decode())
    except ValueError:
        return secret, own_path("")


def forget_session(response: Response) -> None:
    response.delete_cookie(COOKIE, path=PREFIX, httponly=True, samesite="strict")


def theme_of(request: Request) -> Theme:
    theme = request.cookies.get(THEME)
    return theme if theme in ("light", "dark") else "system"  # type: ignore[return-value]  # narrowed by the test


def to_sign_in(request: Request) -> Response:
    """Redirect to the sign-in page, which redirects back."""
    query = query_of(request)
    back = request.scope["path"] + (f"?{query}" if query else "")
    wanted = {"next": back} if request.method == "GET" and back.rstrip("/") != PREFIX else {}
    response = RedirectResponse(f"{PREFIX}/sign-in{'?' if wanted else ''}{urlencode(wanted)}", status_code=303)
    forget_session(response)
    return response


def query_of(request: Request) -> str:
    """Return the query as it was sent. `request.url` would contain the untrusted Host header."""
    sent: bytes = request.scope["query_string"]
    return sent.decode("latin-1")


def own_path(wanted: str) -> str:
    """Return the path to open after signing in, which is always within the dashboard."""
    try:
        parts = urlsplit(wanted)
    except ValueError:
        return f"{PREFIX}/"
    if parts.scheme or parts.netloc or not under(parts.path, PREFIX) or "\\" in wanted or not wanted.isprintable():
        return f"{PREFIX}/"
    return parts.path + (f"?{parts.query}" if parts.query else "")
