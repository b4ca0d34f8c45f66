"""The same wish twice is one thing done, and one answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tessera.shared.api.admin import TokenSpec
from tests.support.coordinator import LiveCoordinator, refused
from tests.support.federation import small_model, start_run, values

pytestmark = pytest.mark.both_databases(long="sqlite")


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


def test_a_repeated_creation_gives_the_first_answer(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    first = http.post("/v1/sites", json={"name": "a"}, headers=keyed("k"))
    again = http.post("/v1/sites", json={"name": "a"}, headers=keyed("k"))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert len(http.get("/v1/sites").json()["items"]) == 1


def test_a_key_that_comes_back_with_another_body_is_refused(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    http.post("/v1/sites", json={"name": "a"}, headers=keyed("k"))
    refused(http.post("/v1/sites", json={"name": "b"}, headers=keyed("k")), 422, "idempotency-key-reused")
    refused(
        http.post("/v1/admin/tokens", json={"name": "a", "role": "viewer"}, headers=keyed("k")),
        422,
        "idempotency-key-reused",
    )


def test_the_same_key_of_two_callers_are_two_wishes(coordinator: LiveCoordinator) -> None:
    for name in "ab":
        assert coordinator.http().post("/v1/sites", json={"name": name}, headers=keyed("k")).status_code == 201


def test_a_refused_creation_may_be_repeated_with_its_key_once_it_can_be_done(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    token = {"name": "t", "role": "site", "site": "later"}
    refused(http.post("/v1/admin/tokens", json=token, headers=keyed("k")), 422, "invalid")
    http.post("/v1/sites", json={"name": "later"})
    assert http.post("/v1/admin/tokens", json=token, headers=keyed("k")).status_code == 201


def test_a_token_is_issued_once_and_its_secret_is_not_shown_again(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    spec = TokenSpec(name="t", role="viewer").model_dump()
    secret = http.post("/v1/admin/tokens", json=spec, headers=keyed("k")).json()["secret"]
    again = http.post("/v1/admin/tokens", json=spec, headers=keyed("k"))
    assert "revoke" in refused(again, 409, "conflict").remedy
    assert secret not in again.text
    assert [t["name"] for t in http.get("/v1/admin/tokens").json()["items"]].count("t") == 1


def test_a_run_is_started_once_however_often_it_is_asked_for_at_once(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    spec = start_run(client, model, values(model)).spec
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: client.create_run(spec, key="one wish").id, range(16)))
    assert len(set(runs)) == 1
    assert len(list(client.runs())) == 2


@pytest.mark.parametrize("key", ["", "x" * 129])
def test_a_key_has_between_1_and_128_characters(standing: LiveCoordinator, key: str) -> None:
    http: httpx.Client = standing.http()
    document = refused(http.post("/v1/sites", json={"name": "a"}, headers=keyed(key)), 422, "invalid")
    assert [fault.pointer for fault in document.errors] == ["/Idempotency-Key"]
