"""Whoever has no token: whatever they send, it is refused as theirs, costs little and is bounded."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera.coordinator.dashboard.session import SIGNING, own_path
from tessera.coordinator.limits.rate import ANONYMOUS
from tessera.shared.api.framing import MEDIA_TYPE
from tests.coordinator.api.test_routes import ROUTES
from tests.coordinator.dashboard.conftest import SAME_ORIGIN
from tests.coordinator.dashboard.test_login import paths
from tests.support.coordinator import Clock, LiveCoordinator

ODD = [
    "//[",
    "http://[",
    "//[::1",
    "//]",
    "/page/[",
    "\\",
    "%00",
    "%ff",
    "..%2f",
    "/page/%0d%0aSet-Cookie:%20a=b",
    "x" * 1900,
]
ODD_HEADERS: list[dict[str, str]] = [
    {"Host": "["},
    {"Host": "[::1"},
    {"Host": "]:[", **SAME_ORIGIN},
    {"Origin": "http://["},
    {"Origin": "http://[::1", "Host": "[::1"},
    {"Cookie": "tessera_session=["},
    {"Cookie": f"{SIGNING}=x.Ly9b", **SAME_ORIGIN},
    {"Cookie": "tessera_theme=[; ;=;;"},
    {"Authorization": "Bearer"},
    {"Authorization": "Basic ["},
    {"Authorization": "Bearer a.b.c"},
    {"Referer": "//[", **SAME_ORIGIN},
    {"Content-Type": "application/json", "Accept": "[", "Range": "bytes=[", "Prefer": "wait=["},
    {"X-Forwarded-For": "[", "Forwarded": "for=[", "traceparent": "["},
]


def sent(http: httpx.Client, method: str, path: str, **request: object) -> int:
    # A stream would not end by itself, and nobody without a token gets one.
    return http.request(method, path, **request).status_code  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> object:
    with LiveCoordinator(
        tmp_path_factory.mktemp("strangers"), auth_failures_per_minute=100_000, enrolments_per_minute=100_000
    ) as live:
        yield live.bare()


def test_nobody_without_a_token_is_answered_500_on_any_route(stranger: httpx.Client, tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path) as live:
        routes = sorted({*ROUTES, *paths(live.app().routes)})
    assert len(routes) > 60
    found = {}
    for number, (method, path) in enumerate(routes):
        # Each route with one of them, and all of them with some route.
        odd = ODD[number % len(ODD)]
        filled = "/".join(odd.replace("/", "%2F") if part.startswith("{") else part for part in path.split("/"))
        headers = ODD_HEADERS[number % len(ODD_HEADERS)]
        query = {"next": odd, "cursor": odd, "limit": odd, "before": odd, "kept": odd}
        status = sent(stranger, method, filled, params=query, headers=headers, content=b"next=%2F%2F%5B&token=%5B")
        if status >= 500:
            found[method, filled, str(headers)] = status
    assert found == {}


@pytest.mark.parametrize("odd", ODD)
def test_what_no_path_is_leads_to_the_page_itself(stranger: httpx.Client, odd: str) -> None:
    assert sent(stranger, "GET", "/page/sign-in", params={"next": odd}) == 200
    form = {"data": {"next": odd, "theme": "dark"}, "headers": SAME_ORIGIN}
    assert stranger.post("/page/theme", **form).headers["Location"].startswith("/page")  # type: ignore[arg-type]
    assert sent(stranger, "POST", "/page/sign-in", data={"next": odd, "token": "x"}, headers=SAME_ORIGIN) == 401


@pytest.mark.parametrize("headers", ODD_HEADERS, ids=str)
def test_no_header_of_a_stranger_is_answered_500(stranger: httpx.Client, headers: dict[str, str]) -> None:
    for method, path in (
        ("GET", "/page/"),
        ("GET", "/page/sign-in?next=//["),
        ("POST", "/page/sign-in"),
        ("POST", "/page/theme"),
        ("GET", "/page/nothing"),
        ("GET", "/page/sign-in/provider/back"),
        ("GET", "/v1/runs"),
        ("POST", "/v1/enrolments"),
        ("GET", "/nothing"),
    ):
        assert sent(stranger, method, path, headers=headers, content=b"{}" if method == "POST" else b"") < 500


@pytest.mark.parametrize(
    "sizes", [b"[" * 20_000, b"[1", b"\xff", b"[" + b"9" * 5_000 + b"]"], ids=lambda sizes: repr(sizes[:9])
)
def test_no_list_of_blobs_of_a_stranger_is_answered_500(stranger: httpx.Client, sizes: bytes) -> None:
    answer = stranger.post("/v1/enrolments", headers={"Content-Type": MEDIA_TYPE}, content=b"{}\n" + sizes)
    assert answer.status_code == 400
    assert "the body is no document with blobs" in answer.text


@example("//[")
@example("http://[")
@example("/page/\ud800")
@given(st.one_of(st.text(), st.text().map("/page/{}".format), st.text().map("//[{}".format)))
@settings(derandomize=True, max_examples=100)
def test_any_text_leads_somewhere_within_the_page(wanted: str) -> None:
    path = own_path(wanted)
    parts = urlsplit(path)
    assert not parts.scheme
    assert not parts.netloc
    assert parts.path == "/page" or parts.path.startswith("/page/")
    assert path.isprintable()
    assert own_path(path) == path


def test_whoever_shows_no_session_is_refused_only_so_often(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, clock=Clock(), auth_failures_per_minute=1) as live:
        stranger = live.bare()
        # A form from elsewhere, and pages that only who is signed in sees.
        assert sent(stranger, "POST", "/page/theme", headers={"Origin": "http://["}) == 403
        assert [sent(stranger, "GET", "/page/runs") for _ in range(ANONYMOUS)] == [303] * (ANONYMOUS - 1) + [429]
        # To sign in is open to all; and who is signed in is none of them.
        signed = live.bare(SAME_ORIGIN)
        assert signed.post("/page/sign-in", data={"token": live.token("viewer")}).status_code == 303
        assert sent(signed, "GET", "/page/runs") == 200


def test_a_refused_stranger_gets_a_page_without_a_template(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering one took 3 ms of the event loop, and eight of them began in one turn of it."""
    rendered: list[str] = []
    render = jinja2.Template.render

    def counted(template: jinja2.Template, *args: object, **kwargs: object) -> str:
        rendered.append(template.name or "")
        return render(template, *args, **kwargs)

    monkeypatch.setattr(jinja2.Template, "render", counted)
    http = coordinator.bare()
    refusals = [
        http.post("/page/sign-in", content=b"token=a"),
        http.post("/page/sign-in", headers=SAME_ORIGIN, content=b"<b>"),
        http.post("/page/sign-in", headers=SAME_ORIGIN, content=b"a" * 100_000),
        http.get("/page/sign-in?next=" + "x" * 2_001),
    ]
    assert [response.status_code for response in refusals] == [403, 400, 413, 422]
    assert all("<h1>" in response.text and "To the overview" in response.text for response in refusals)
    assert rendered == []
