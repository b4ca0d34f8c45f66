"""People who look at the page: over bare HTTP, and with a real browser where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import httpx
import pytest
from playwright.sync_api import Browser

from tessera.shared.schema import TokenRole
from tests.support.browser import chromium
from tests.support.coordinator import LiveCoordinator
from tests.support.pages import Page

SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


class Person:
    """Somebody with a browser that does nothing by itself."""

    def __init__(self, coordinator: LiveCoordinator) -> None:
        self.http = coordinator.bare(dict(SAME_ORIGIN))

    def sign_in(self, token: str) -> httpx.Response:
        return self.http.post("/page/sign-in", data={"token": token})

    @property
    def cookie(self) -> dict[str, str]:
        """What a browser sends to the page, and would have to be made to send elsewhere."""
        return {"Cookie": "; ".join(f"{name}={value}" for name, value in self.http.cookies.items())}

    def form_token(self) -> str:
        found = re.search(
            r'name="form_token" value="([0-9a-f]{64})"', self.http.get("/page/", follow_redirects=True).text
        )
        assert found
        return found.group(1)

    def see(self, path: str) -> Page:
        """Open a page that is there."""
        answer = self.http.get(f"/page{path}")
        assert answer.status_code == 200, path
        return Page(answer.text)

    def send(self, path: str, **fields: str) -> httpx.Response:
        """A form as the page has it."""
        return self.http.post(path, data={"form_token": self.form_token(), **fields})


def signed_in(
    coordinator: LiveCoordinator, role: TokenRole = "admin", studies: Sequence[str] = ("default",)
) -> Person:
    person = Person(coordinator)
    assert person.sign_in(coordinator.token(role, studies=studies)).status_code == 303
    return person


@pytest.fixture
def admin(coordinator: LiveCoordinator) -> Person:
    return signed_in(coordinator)


@pytest.fixture
def viewer(coordinator: LiveCoordinator) -> Person:
    return signed_in(coordinator, "viewer")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started
