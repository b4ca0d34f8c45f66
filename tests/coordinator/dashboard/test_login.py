"""Signing in, and what keeps everybody else out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from starlette.routing import BaseRoute, Route

from tessera.coordinator.auth import sessions
from tessera.coordinator.auth.tokens import authenticate
from tessera.coordinator.dashboard.security_headers import HEADERS
from tessera.coordinator.dashboard.session import own_path
from tessera.coordinator.db.tables import SessionRow
from tessera.coordinator.domain.principal import Principal
from tessera.shared.problems import Unauthenticated
from tests.coordinator.dashboard.conftest import SAME_ORIGIN, Person, signed_in
from tests.support.coordinator import Clock, LiveCoordinator


def cookie_of(answer: httpx.Response) -> dict[str, str]:
    (morsel,) = SimpleCookie(answer.headers["Set-Cookie"]).values()
    return {"name": morsel.key, "value": morsel.value, **{name: value for name, value in morsel.items() if value}}


def test_a_token_becomes_a_session_of_which_only_a_hash_is_kept(coordinator: LiveCoordinator) -> None:
    answer = Person(coordinator).sign_in(coordinator.token("viewer"))
    cookie = cookie_of(answer)
    assert (cookie["name"], cookie["path"], cookie["samesite"]) == ("tessera_session", "/page", "strict")
    assert cookie["httponly"]
    assert "secure" not in cookie  # on the machine itself
    with coordinator.services.database.snapshot() as session:
        (row,) = session.scalars(select(SessionRow))
    assert cookie["value"] not in (row.id, row.token_id)
    assert row.expires_at - row.created_at == coordinator.settings.session_seconds


def test_a_session_is_kept_over_tls_alone_except_on_the_machine_itself(coordinator: LiveCoordinator) -> None:
    person = Person(coordinator)
    answer = person.http.post(
        "/page/sign-in", data={"token": coordinator.token("viewer")}, headers={"Host": "tessera.example"}
    )
    assert cookie_of(answer)["secure"]


@pytest.mark.parametrize("token", ["", "tessera_admin_nothing", "ü" * 40])
def test_what_is_no_token_begins_no_session(standing: LiveCoordinator, token: str) -> None:
    answer = Person(standing).sign_in(token)
    assert answer.status_code == 401
    assert "Set-Cookie" not in answer.headers
    assert 'role="alert"' in answer.text


def test_a_token_used_only_on_the_dashboard_is_not_listed_as_never_used(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock) as coordinator:
        admin, secret = coordinator.client(), coordinator.token("viewer")

        def last_used() -> datetime | None:
            return next(token.last_used_at for token in admin.tokens() if token.role == "viewer")

        assert last_used() is None
        person = Person(coordinator)
        person.sign_in(secret)
        signed_in_at = last_used()
        assert signed_in_at
        clock.advance(60)
        person.http.get("/page/")
        assert last_used() == signed_in_at + timedelta(seconds=60)


def test_who_guesses_too_often_is_refused_for_a_while(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, auth_failures_per_minute=3) as coordinator:
        person = Person(coordinator)
        assert [person.sign_in("x").status_code for _ in range(4)] == [401, 401, 401, 429]
        assert int(person.sign_in("x").headers["Retry-After"]) > 0


def test_a_token_begins_few_sessions_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, auth_failures_per_minute=3) as coordinator:
        person, token = Person(coordinator), coordinator.token("viewer")
        assert [person.sign_in(token).status_code for _ in range(4)] == [303, 303, 303, 429]
        refused = person.sign_in(token)
        assert "auth_failures_per_minute" in refused.text
        # Three a minute.
        assert refused.headers["Retry-After"] == "20"
        # Signed in are those that were, and others may.
        assert person.http.get("/page/").status_code == 200
        assert Person(coordinator).sign_in(coordinator.token("admin")).status_code == 303
        clock.advance(20)
        assert person.sign_in(token).status_code == 303
        begun = [entry for entry in coordinator.client().audit() if entry.action == "session.begin"]
        assert len(begun) == 5


def test_a_token_and_a_person_have_32_sessions_and_a_further_one_ends_the_oldest(
    coordinator: LiveCoordinator,
) -> None:
    issuer, secret = "https://issuer", coordinator.token("viewer")
    with coordinator.services.database.transaction() as session:
        for caller in (authenticate(session, 0.0, secret), Principal.person(f"{issuer}#alice", "viewer")):
            secrets = [sessions.begin(session, float(at), caller, 1000) for at in range(33)]
            with pytest.raises(Unauthenticated):
                sessions.holder(session, 40.0, secrets[0], issuer)
            assert {sessions.holder(session, 40.0, one, issuer) for one in secrets[1:]} == {caller}


def test_a_session_ends_with_its_token(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "viewer")
    assert person.http.get("/page/").status_code == 200
    client = coordinator.client()
    for token in client.tokens():
        if token.role == "viewer":
            client.revoke_token(token.id)
    answer = person.http.get("/page/runs")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/page/sign-in?next=%2Fpage%2Fruns")


def test_a_session_ends_by_itself(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, session_seconds=100) as coordinator:
        person = signed_in(coordinator)
        clock.advance(99)
        assert person.http.get("/page/").status_code == 200
        clock.advance(2)
        assert person.http.get("/page/").status_code == 303


def test_who_signs_out_is_out_wherever_the_cookie_went(coordinator: LiveCoordinator, admin: Person) -> None:
    stolen = admin.cookie
    assert admin.send("/page/sign-out").status_code == 303
    with coordinator.services.database.snapshot() as session:
        assert session.scalars(select(SessionRow)).all() == []
    assert coordinator.bare(stolen).get("/page/").status_code == 303


def paths(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        if within := getattr(route, "original_router", None):
            yield from paths(within.routes)
        elif isinstance(route, Route) and route.path.startswith("/page/"):
            yield from ((method, route.path) for method in route.methods or ())


OPEN = {
    ("GET", "/page/sign-in"),
    ("POST", "/page/sign-in"),
    ("GET", "/page/sign-in/provider"),
    ("GET", "/page/sign-in/provider/back"),
    ("POST", "/page/theme"),
}


def test_who_is_not_signed_in_is_shown_the_door_everywhere(standing: LiveCoordinator) -> None:
    there = set(paths(standing.app().routes))
    assert there > OPEN
    assert len(there) > 20
    nobody = Person(standing).http
    for method, path in there - OPEN:
        answer = nobody.request(method, path)
        assert (answer.status_code, answer.headers["Location"].partition("?")[0]) == (303, "/page/sign-in"), path


def test_the_cookie_is_worth_nothing_to_the_api(coordinator: LiveCoordinator, admin: Person) -> None:
    for path in ("/v1/runs", "/v1/admin/audit", "/v1/events", "/metrics"):
        answer = coordinator.bare(admin.cookie).get(path)
        assert answer.status_code == 401, path


POSTS = ["/page/sign-out", "/page/runs/new", "/page/runs/nothing/state"]


FROM_ELSEWHERE: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "https://elsewhere.example"},
    {"Origin": "null"},
    {},
]


@pytest.mark.parametrize("headers", FROM_ELSEWHERE)
def test_a_form_of_another_site_is_refused(standing: LiveCoordinator, headers: dict[str, str]) -> None:
    admin = signed_in(standing)
    fields = {"form_token": admin.form_token(), "token": standing.token("admin"), "theme": "dark"}
    for path in (*POSTS, "/page/sign-in", "/page/theme"):
        answer = standing.bare(headers | admin.cookie).post(path, data=fields)
        assert answer.status_code == 403, path
        assert "was not sent by this dashboard" in answer.text


def test_a_browser_that_only_tells_its_origin_may_send_forms(coordinator: LiveCoordinator) -> None:
    person = Person(coordinator)
    del person.http.headers["Sec-Fetch-Site"]
    person.http.headers["Origin"] = coordinator.url
    assert person.sign_in(coordinator.token("admin")).status_code == 303


@pytest.mark.parametrize("path", POSTS)
def test_a_form_without_the_sessions_own_token_is_refused(standing: LiveCoordinator, path: str) -> None:
    admin, of_another = signed_in(standing), signed_in(standing).form_token()
    for fields in ({}, {"form_token": ""}, {"form_token": of_another}, {"form_token": "ü"}):
        answer = admin.http.post(path, data=fields)
        assert answer.status_code == 403, fields
        assert "does not belong to your session" in answer.text


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/sign-in", "/page/nothing", "/page/static/page.css", "/page/static/nothing", "/page/runs/x"],
)
def test_every_answer_says_what_a_browser_may_do_with_it(standing: LiveCoordinator, path: str) -> None:
    answer = signed_in(standing).http.get(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "Cache-Control" in answer.headers
    assert "unsafe" not in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "wanted",
    ["https://evil.example/page/", "//evil.example/page/", "/\\evil.example", "/v1/runs", "javascript:alert(1)", "",
     "/page/\r\nX: y", "/pageant", "page/"],
)  # fmt: skip
def test_signing_in_leads_nowhere_but_into_the_page(wanted: str) -> None:
    assert own_path(wanted) == "/page/"


def test_signing_in_leads_to_where_one_wanted_to_go(coordinator: LiveCoordinator) -> None:
    person = Person(coordinator)
    sent = person.http.get("/page/runs?state=running")
    answer = person.http.post(
        "/page/sign-in", data={"token": coordinator.token("viewer"), "next": "/page/runs?state=running"}
    )
    assert sent.headers["Location"] == "/page/sign-in?next=%2Fpage%2Fruns%3Fstate%3Drunning"
    assert person.http.get(answer.headers["Location"]).headers["Location"] == "/page/runs?state=running"


def test_a_browser_that_keeps_no_session_is_told_so(coordinator: LiveCoordinator) -> None:
    answer = coordinator.bare(SAME_ORIGIN).get("/page/signed-in?next=/page/", follow_redirects=True)
    assert "did not keep the session" in answer.text


@pytest.mark.parametrize("path", ["/", "/page"])
def test_the_page_is_found_from_the_top(standing: LiveCoordinator, path: str) -> None:
    assert signed_in(standing).http.get(path, follow_redirects=True).url.path == "/page/"
