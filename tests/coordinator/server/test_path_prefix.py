"""A coordinator that a proxy serves under a path, whether the proxy takes the path off or not."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.support.coordinator import LiveCoordinator

PATH = "/tessera"


@pytest.mark.parametrize("left", ["", PATH], ids=["taken-off", "left"])
def test_the_dashboard_works_under_a_path(tmp_path: Path, left: str) -> None:
    with LiveCoordinator(tmp_path, public_url=f"https://hospital.example{PATH}/") as live:

        def sent(method: str, path: str, **options: object) -> httpx.Response:
            """What the proxy does with a browser's request."""
            assert path.startswith(f"{PATH}/"), path
            return http.request(method, left + path.removeprefix(PATH), **options)  # type: ignore[arg-type]

        with httpx.Client(base_url=live.url, headers={"Sec-Fetch-Site": "same-origin"}) as http:
            page = sent("GET", f"{PATH}/page/sign-in")
            done = sent("POST", f"{PATH}/page/sign-in", data={"token": live.token("admin")})
            (cookie,) = done.headers.get_list("Set-Cookie")
            assert f"; Path={PATH}/page;" in cookie
            signed = {"Cookie": cookie.partition(";")[0]}
            back = sent("GET", done.headers["Location"], headers=signed)
            overview = sent("GET", back.headers["Location"], headers=signed)
            root = sent("GET", f"{PATH}/")
            assert root.headers["Location"] == f"{PATH}/page/"
            for shown in (page, overview, sent("GET", f"{PATH}/page/runs", headers=signed)):
                assert shown.status_code == 200
                links = re.findall(r'(?:href|src|action|formaction|data-events)="(/[^"]*)"', shown.text)
                assert len(links) >= 4
                assert [link for link in links if not link.startswith(f"{PATH}/")] == []
            style = next(link for link in re.findall(r'href="([^"]*)"', page.text) if "page.css" in link)
            assert sent("GET", style).headers["Content-Type"].startswith("text/css")
            assert sent("GET", f"{PATH}/problems/not-found").status_code == 200
            assert sent("GET", f"{PATH}/version").json()["version"]


def test_a_path_is_of_whole_names(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, public_url="https://hospital.example/v") as live, live.bare() as http:
        assert http.get("/version").status_code == http.get("/v/version").status_code == 200
        assert http.get("/v/v/version").status_code == 404
