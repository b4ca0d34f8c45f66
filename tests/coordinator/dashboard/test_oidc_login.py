"""People who sign in to the page at an OpenID provider: a real one, which is another site to their browser."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, expect
from sqlalchemy import select, update

from tessera.coordinator.auth.oidc import BACK
from tessera.coordinator.db.tables import PersonSessionRow
from tessera.coordinator.limits.rate import Rate
from tests.coordinator.dashboard.conftest import Person
from tests.coordinator.dashboard.test_browser import visiting
from tests.support.coordinator import LiveCoordinator
from tests.support.provider import Provider, providing, settings

TO_PROVIDER = "/page/sign-in/provider"


@pytest.fixture
def provider() -> Iterator[Provider]:
    # By another name than the coordinator's, or a browser would take both for one site.
    with providing("localhost") as made:
        yield made


@pytest.fixture
def live(tmp_path: Path, provider: Provider) -> Iterator[LiveCoordinator]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    secret = tmp_path / "client-secret"
    secret.write_text("s%cret\n")
    given = settings(
        provider,
        oidc_client_id="the page",
        oidc_client_secret_file=secret,
        public_url=f"http://127.0.0.1:{port}",
        auth_failures_per_minute=10_000,
    )
    with LiveCoordinator(tmp_path, port=port, **given) as coordinator:
        yield coordinator


def come_back(person: Person, provider: Provider, **changed: str | None) -> httpx.Response:
    """Goes to the provider and back, with an answer that may have been changed on the way."""
    gone = person.http.get(TO_PROVIDER)
    assert gone.status_code == 303
    on = httpx.get(gone.headers["Location"]).text.partition('href="')[2].partition('"')[0].replace("&amp;", "&")
    query: dict[str, Any] = {**dict(parse_qsl(urlsplit(on).query)), **changed}
    return person.http.get(BACK, params={name: value for name, value in query.items() if value is not None})


def test_somebody_signs_in_at_the_provider_and_is_where_they_wanted_to_go(
    browser: Browser, live: LiveCoordinator, provider: Provider
) -> None:
    with browser.new_context() as context:
        visit = visiting(context, live)
        page = visit.open("/sites")
        page.get_by_role("link", name=f"Sign in at {urlsplit(provider.url).netloc}").click()
        page.get_by_role("link", name="Log in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sites and workers")
        expect(page.locator(".who")).to_have_text("Signed in as alice orchestrator")
        # To the provider went the browser itself, and nobody else.
        assert {urlsplit(url).path for url in visit.elsewhere} <= {"/authorize", "/favicon.ico"}
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        assert visit.open("/sites").url.partition("?")[0].endswith("/sign-in")
        assert visit.said == []
    actions = [(entry.action, entry.actor) for entry in live.client().audit() if entry.action.startswith("session.")]
    assert actions == [(f"session.{what}", f"orchestrator:{provider.url}#alice") for what in ("begin", "end")]


def test_the_provider_is_told_only_hashes_of_what_the_browser_keeps(
    live: LiveCoordinator, provider: Provider
) -> None:
    person = Person(live)
    assert come_back(person, provider).status_code == 200
    told = " ".join(f"{asked.path} {asked.body.decode()}" for asked in provider.asked)
    (redeemed,) = (asked for asked in provider.asked if asked.path == "/token")
    assert redeemed.headers["Authorization"] == httpx.BasicAuth("the%20page", "s%25cret")._auth_header
    assert all(value not in told for value in person.http.cookies.values())
    assert "client_secret" not in told
    assert person.http.get("/page/").status_code == 200
    assert "tessera_signing" not in person.http.cookies


def test_an_answer_that_was_changed_on_the_way_admits_nobody(live: LiveCoordinator, provider: Provider) -> None:
    ways: list[tuple[dict[str, str | None], str]] = [
        ({"state": "0" * 64}, "another browser"),
        ({"state": None}, "another browser"),
        ({"code": "code-of-somebody-else"}, "did not exchange its code"),
        ({"code": None, "error": "access_denied", "error_description": "not <b>you</b>"}, "not &lt;b&gt;you"),
        ({"iss": "https://login.example"}, "another provider"),
    ]
    for changed, reason in ways:
        person = Person(live)
        answer = come_back(person, provider, **changed)
        assert (answer.status_code, reason in answer.text) == (401, True), changed
        assert "tessera_session" not in person.http.cookies, changed


def test_a_token_that_was_not_made_for_this_signing_in_admits_nobody(
    live: LiveCoordinator, provider: Provider
) -> None:
    tokens: list[tuple[dict[str, Any], int, str]] = [
        ({"nonce": "0" * 64}, 401, "of another signing in"),
        ({"nonce": None}, 401, "of another signing in"),
        ({"aud": "tessera"}, 401, "is not one of"),
        ({"aud": ["the page", "other"], "azp": "other"}, 401, "another client"),
        ({"exp": time.time() - 60}, 401, "is not one of"),
        ({"iss": "https://login.example"}, 401, "is not one of"),
        ({"roles": ["staff"]}, 403, "is a role here"),
    ]
    for claims, status, reason in tokens:
        provider.person = claims
        person = Person(live)
        answer = come_back(person, provider)
        assert (answer.status_code, reason in answer.text) == (status, True), claims
        assert "tessera_session" not in person.http.cookies, claims


def test_an_answer_is_worth_nothing_in_another_browser(live: LiveCoordinator, provider: Provider) -> None:
    begun, other = Person(live), Person(live)
    other.http.get(TO_PROVIDER)
    begun.http.cookies.set("tessera_signing", other.http.cookies["tessera_signing"], path="/page/sign-in")
    answer = come_back(begun, provider)
    # The cookie that beginning again has set is the one that counts.
    assert answer.status_code == 200
    code, state = "code-9", "0" * 64
    assert other.http.get(BACK, params={"code": code, "state": state}).status_code == 401


def test_a_session_ends_with_the_provider_and_by_itself(live: LiveCoordinator, provider: Provider) -> None:
    person = Person(live)
    come_back(person, provider)
    assert person.http.get("/page/").status_code == 200
    with live.services.database.transaction() as session:
        (row,) = session.scalars(select(PersonSessionRow))
        assert row.person == f"{provider.url}#alice"
        session.execute(update(PersonSessionRow).values(person="https://before.example#alice"))
    assert person.http.get("/page/").status_code == 303


def test_a_person_begins_few_sessions_a_minute(live: LiveCoordinator, provider: Provider) -> None:
    person = Person(live)
    live.services.admission._sign_ins = Rate(1 / 60, 2)
    assert [come_back(person, provider).status_code for _ in range(3)] == [200, 200, 429]


def test_there_is_no_way_to_a_provider_where_none_is_named(standing: LiveCoordinator) -> None:
    assert Person(standing).http.get(TO_PROVIDER).status_code == 404
    assert "provider" not in Person(standing).http.get("/page/sign-in").text


def test_a_provider_that_is_away_is_said_to_be(live: LiveCoordinator, provider: Provider) -> None:
    provider.about = {"issuer": "https://login.example"}
    answer = Person(live).http.get(TO_PROVIDER)
    assert answer.status_code == 503
    assert "does not answer" in answer.text
