"""Sign-in, sign-out and the colour theme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from tessera.coordinator.api.dependencies import Serving, address_of
from tessera.coordinator.auth import sessions
from tessera.coordinator.auth.tokens import authenticate
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import (
    COOKIE,
    READERS,
    SIGNING,
    SIGNING_PATH,
    THEME,
    Fields,
    PageRoute,
    Sender,
    forget_session,
    keep_session,
    keep_signing,
    own_path,
    signing,
    visitor,
)
from tessera.coordinator.dashboard.templating import first_up, render
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.problems import Forbidden, NotFound, Problem, Unauthenticated
from tessera.shared.schema import TokenRole

if TYPE_CHECKING:
    from tessera.coordinator.auth.oidc import OIDCLogin

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

ADMITTED: tuple[TokenRole, ...] = (*READERS, "site")

KEPT = "kept"
"""Query parameter after a sign-in whose cookie the browser did not keep."""

THEME_SECONDS = 365 * 86_400

Next = Annotated[str, Query(max_length=2_000)]


@router.get("/sign-in")
def show_sign_in(request: Request, serving: Serving, next: Next = "") -> Response:  # noqa: A002 (as browsers send it)
    wrong = ""
    if KEPT in request.query_params:
        wrong = "Your browser did not keep the session. It needs HTTPS for that, except on this machine itself."
    return _sign_in(request, serving, own_path(next), wrong)


@router.post("/sign-in")
def sign_in(request: Request, serving: Serving, fields: Fields) -> Response:
    """Begin a session. An address with too many failures is refused for a while."""
    wanted = own_path(fields.get("next", ""))
    try:
        caller = _holder(serving, fields.get("token", "").strip(" \t\r\n\"'\u201c\u201d"))
    except Unauthenticated as refusal:
        return _refused(request, serving, wanted, refusal)
    response = RedirectResponse(f"{PREFIX}/signed-in?{urlencode({'next': wanted})}", status_code=303)
    _begin_session(request, response, serving, caller)
    return response


@router.get("/sign-in/provider")
def go_to_provider(request: Request, serving: Serving, next: Next = "") -> Response:  # noqa: A002 (as browsers send it)
    """Redirect to the OpenID provider. Raises NotFound if there is none, and Unavailable."""
    url, secret = _provider(serving).begin()
    response = RedirectResponse(url, status_code=303)
    keep_signing(request, response, secret, own_path(next))
    return response


@router.get("/sign-in/provider/back")
def come_back(request: Request, serving: Serving) -> Response:
    """Begin a session for a person whom the provider sent back. Too many failures are refused for a while."""
    secret, wanted = signing(request)
    try:
        caller = _provider(serving).finish(secret, request.query_params)
    except (Unauthenticated, Forbidden) as refusal:
        response = _refused(request, serving, wanted, refusal)
    else:
        # Not a redirect: it would count as the provider's, and the browser would not send the new cookie with it.
        response = render(request, "signed_in.html", None, onward=f"{PREFIX}/signed-in?{urlencode({'next': wanted})}")
        _begin_session(request, response, serving, caller)
    response.delete_cookie(SIGNING, path=SIGNING_PATH, httponly=True, samesite="lax")
    return response


@router.get("/signed-in")
def signed_in(request: Request, serving: Serving, next: Next = "") -> Response:  # noqa: A002 (the same)
    """Redirect to the requested page, or back to the sign-in if the browser did not keep the session."""
    if not request.cookies.get(COOKIE):
        return RedirectResponse(f"{PREFIX}/sign-in?{KEPT}=no", status_code=303)
    visitor(request, serving)
    return RedirectResponse(own_path(next), status_code=303)


@router.post("/sign-out")
def sign_out(serving: Serving, who: Sender) -> Response:
    with serving.database.transaction() as session:
        sessions.end(session, serving.database.now(), who.principal, who.secret)
    response = RedirectResponse(f"{PREFIX}/sign-in", status_code=303)
    forget_session(response)
    return response


@router.post("/theme")
def set_theme(fields: Fields) -> Response:
    """Store the colour theme in the browser: light, dark, or the system's."""
    response = RedirectResponse(own_path(fields.get("next", "")), status_code=303)
    wanted = fields.get("theme", "")
    if wanted in ("light", "dark"):
        response.set_cookie(THEME, wanted, max_age=THEME_SECONDS, path=PREFIX, httponly=True, samesite="strict")
    else:
        response.delete_cookie(THEME, path=PREFIX, httponly=True, samesite="strict")
    return response


def _provider(serving: Services) -> OIDCLogin:
    """Raise NotFound."""
    if serving.sign_in is None:
        raise NotFound(
            "people sign in here with a token", remedy="Set TESSERA_OIDC_CLIENT_ID to enable sign-in at a provider."
        )
    return serving.sign_in


def _holder(serving: Services, token: str) -> Principal:
    """Raise Unauthenticated."""
    with serving.database.snapshot() as session:
        caller = authenticate(session, serving.database.now(), token)
    if caller.role not in ADMITTED:
        raise Unauthenticated(f"a token of role {caller.role} is for workers and gives no access to the dashboard")
    return caller


def _begin_session(request: Request, response: Response, serving: Services, caller: Principal) -> None:
    """Begin a session, and let the browser keep its secret while it is valid. Raises TooManyRequests."""
    serving.admission.count_sign_in(caller.token_id)
    serving.last_seen.note_use(caller.token_id, serving.database.now())
    seconds = serving.settings.session_seconds
    with serving.database.transaction() as session:
        secret = sessions.begin(session, serving.database.now(), caller, seconds)
    keep_session(request, response, secret, seconds)


def _refused(request: Request, serving: Services, wanted: str, refusal: Problem) -> Response:
    """Count a failed sign-in, and show its reason."""
    serving.admission.count_failure(address_of(request))
    return _sign_in(request, serving, wanted, f"{first_up(refusal.detail)}.", status=refusal.status)


def _sign_in(request: Request, serving: Services, wanted: str, wrong: str, status: int = 200) -> Response:
    seconds = serving.settings.session_seconds
    provider = serving.sign_in.host if serving.sign_in else None
    shown = {"next": wanted, "wrong": wrong, "seconds": seconds, "provider": provider}
    return render(request, "sign_in.html", None, status=status, **shown)
