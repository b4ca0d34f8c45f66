"""The OWASP API Security Top 10 of 2023, in its order: what the other tests do not show already.

docs/security.md has all ten, with the tests that show each.
"""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tessera.coordinator.auth.oidc import OIDCVerifier
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.problems import Unavailable
from tests.coordinator.api.test_routes import ROUTES
from tests.support.coordinator import Clock, LiveCoordinator, refused
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.scripted import Answer, answering

# ---------------------------------------------------------------- API1


def test_api1_no_identifier_of_another_site_opens_anything(coordinator: LiveCoordinator) -> None:
    admin, model = coordinator.client(), small_model()
    run = start_run(admin, model, values(model))
    task = ScriptedWorker(coordinator.client("site", "a")).take()
    other = coordinator.http("site", "b")
    seen = [run.id, task.id, run.version.digest, run.spec.model]
    tried = 0
    for method, path in ROUTES:
        for name in re.findall(r"\{(run_id|task_id|digest)\}", path):
            for identifier in seen:
                given = {"run_id": run.id, "task_id": task.id, "digest": identifier, name: identifier, "number": "1"}
                body = {"token": task.token, "code": "x", "detail": "x", "examples": 1, "metrics": {}}
                body |= {"version": run.version.digest, "update": run.version.digest}
                answer = other.request(method, path.format(**given), json=body, params={"since": "0"})
                assert answer.status_code in (403, 404, 422), (method, path, answer.text)
                assert "a/w" not in answer.text
                tried += 1
    assert tried > 50
    assert admin.task(task.id).state == "leased"


# ---------------------------------------------------------------- API2


def test_api2_whoever_guesses_is_slowed_down_and_whoever_knows_is_not(tmp_path: Path) -> None:
    # Few, so that none is forgotten while a busy machine takes its time.
    with LiveCoordinator(tmp_path, clock=Clock(), auth_failures_per_minute=3) as coordinator:
        bare, known = coordinator.bare(), coordinator.http("viewer")
        guesses = [{"Authorization": f"Bearer {new_secret('admin')}"} for _ in range(4)]
        *before, answer = (bare.get("/v1/runs", headers=guess) for guess in guesses)
        assert [each.status_code for each in before] == [401, 401, 401]
        assert "auth_failures_per_minute" in refused(answer, 429, "too-many-requests").detail
        assert answer.headers["Retry-After"] == "20"
        refused(bare.get("/v1/runs"), 429, "too-many-requests")
        # To guess the secret of a worker that waits is no way around it.
        asked = bare.get("/v1/enrolments/x", headers={"Authorization": "Bearer x"})
        refused(asked, 429, "too-many-requests")
        assert known.get("/v1/runs").status_code == 200


@pytest.mark.parametrize(
    "place", ["/v1/runs?access_token={}", "/v1/runs?token={}", "/v1/runs?authorization=Bearer {}"]
)
def test_api2_a_token_in_a_url_is_not_looked_at(standing: LiveCoordinator, place: str) -> None:
    # Where it would be written into the logs of all who are on the way.
    refused(standing.bare().get(place.format(standing.token("admin"))), 401, "unauthenticated")


# ---------------------------------------------------------------- API3


def test_api3_nobody_sets_what_is_not_theirs_to_set(coordinator: LiveCoordinator) -> None:
    admin, model = coordinator.client(), small_model()
    run = start_run(admin, model, values(model))
    http = coordinator.http("orchestrator")
    spec = run.spec.model_dump(mode="json")
    for name, value in (("owner", "token:other"), ("state", "completed"), ("id", "x"), ("version_number", 3)):
        answer = http.post("/v1/runs", json={**spec, name: value})
        assert [fault.pointer for fault in refused(answer, 422, "invalid").errors] == [f"/{name}"]
    owner = coordinator.http("admin")
    for more in ({"owner": "x"}, {"spec": spec}, {"state": "completed"}):
        answer = owner.patch(f"/v1/runs/{run.id}", json={"state": "paused", **more}, headers={"If-Match": '"1"'})
        assert refused(answer, 422, "invalid").errors
    for body in ({"name": "s", "suspended_at": None}, {"name": "s", "id": "x"}):
        refused(owner.post("/v1/sites", json=body), 422, "invalid")
    token = {"name": "t", "role": "viewer"}
    for more in ({"secret": "x"}, {"secret_hash": "0" * 64}, {"uses": 3}, {"uses_left": 3}):
        refused(owner.post("/v1/admin/tokens", json={**token, **more}), 422, "invalid")
    assert admin.run(run.id).state == "running"


def test_api3_a_worker_that_asks_to_join_decides_nothing_about_it(coordinator: LiveCoordinator) -> None:
    wish = {"site": "north", "worker": "w", "secret_hash": hash_of(new_secret("site"))}
    more = {"state": "approved", "code": "BBBB-BBBB", "role": "admin", "address": "10.0.0.1", "id": "chosen"}
    made = coordinator.bare().post("/v1/enrolments", json={**wish, **more}).json()
    assert (made["state"], made["address"]) == ("pending", "127.0.0.1")
    assert made["id"] != "chosen"
    assert made["code"] != "BBBB-BBBB"


def test_api3_no_answer_has_a_hash_of_a_secret(coordinator: LiveCoordinator) -> None:
    admin = coordinator.http("admin")
    secret = new_secret("site")
    wish = {"site": "north", "worker": "w", "secret_hash": hash_of(secret)}
    coordinator.bare().post("/v1/enrolments", json=wish)
    coordinator.client().issue_token(TokenSpec(name="t", role="viewer"))
    for path in ("/v1/admin/tokens", "/v1/enrolments", "/v1/admin/audit", "/v1/sites"):
        answer = admin.get(path)
        assert answer.status_code == 200
        assert "hash" not in answer.text
        # But for the chain of the audit and the names of blobs, nothing is as long as a hash.
        told = {key: value for item in answer.json()["items"] for key, value in flat(item)}
        assert hash_of(secret) not in json.dumps({k: v for k, v in told.items() if k not in ("digest", "previous")})


def flat(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return []
    return [pair for key, inner in value.items() for pair in [(key, inner), *flat(inner)]]


# ---------------------------------------------------------------- API4


@pytest.mark.parametrize("limit", ["0", "501", "-1", "1e3", "999999999999999999999"])
def test_api4_a_page_has_an_end(standing: LiveCoordinator, limit: str) -> None:
    http = standing.http("admin")
    for path in ("/v1/runs", "/v1/sites", "/v1/workers", "/v1/enrolments", "/v1/admin/tokens", "/v1/admin/audit"):
        refused(http.get(path, params={"limit": limit}), 422, "invalid")
    refused(standing.http("site", "a").get("/v1/tasks", params={"limit": limit}), 422, "invalid")


# ---------------------------------------------------------------- API7


def test_api7_nothing_that_a_caller_names_is_fetched(coordinator: LiveCoordinator) -> None:
    admin, model = coordinator.client(), small_model()
    run = start_run(admin, model, values(model))
    http, site = coordinator.http("admin"), coordinator.http("site", "a")
    with answering(Answer(200, b"{}")) as (url, asked):
        spec = run.spec.model_dump(mode="json")
        for change in ({"model": url}, {"version": url}, {"name": url}, {"dataset": url}):
            refused(http.post("/v1/runs", json={**spec, **change}), 422, "invalid")
        claim = {"worker": "w", "instance": "0" * 32, "datasets": {}, "device": url[:64]}
        pointing = {"Host": url.removeprefix("http://"), "X-Forwarded-Host": url, "Forwarded": f"host={url}"}
        assert site.post("/v1/tasks/claim", json=claim, headers=pointing).status_code == 204
        http.get(f"/v1/blobs/{url}")
        http.post("/v1/enrolments", json={"site": "a", "worker": "w", "device": url, "secret_hash": "0" * 64})
        assert asked == []


# ---------------------------------------------------------------- API8


def test_api8_no_other_page_may_read_answers_and_none_names_its_server(standing: LiveCoordinator) -> None:
    http = standing.http("admin")
    origin = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "GET"}
    for answer in (http.get("/v1/runs", headers=origin), http.options("/v1/runs", headers=origin), http.get("/none")):
        names = {name.lower() for name in answer.headers}
        assert not any(name.startswith("access-control-") for name in names)
        assert not names & {"server", "x-powered-by"}


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PUT", "PROPFIND", "DEBUG"])
def test_api8_methods_that_nobody_needs_do_nothing(standing: LiveCoordinator, method: str) -> None:
    address = urlsplit(standing.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request(
        method, "/v1/runs", headers={"Authorization": f"Bearer {standing.token('admin')}", "X-A": "secret"}
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status in (400, 405)
    assert b"secret" not in content


def test_api8_a_refusal_tells_nothing_of_the_code(standing: LiveCoordinator) -> None:
    http = standing.http("admin")
    hostile = "'; drop table runs; --<script>"
    for answer in (
        http.get(f"/v1/runs/{hostile}"),
        http.get("/v1/runs", params={"cursor": hostile}),
        http.post("/v1/runs", content=hostile),
        http.get("/v1/tasks/%00"),
    ):
        assert 400 <= answer.status_code < 500
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert not re.search(r"Traceback|sqlalchemy|site-packages|\.py\b|SELECT ", answer.text)


# ---------------------------------------------------------------- API9


def test_api9_there_is_no_route_that_the_description_leaves_out(standing: LiveCoordinator) -> None:
    described = standing.http("viewer").get("/openapi.json").json()["paths"]
    missing = {path for _, path in ROUTES} - set(described)
    # The description itself, and the pages that problems point to.
    assert missing == {"/openapi.json", "/problems", "/problems/{code}"}
    versions = {path.split("/")[1] for path in described if path.startswith("/v")}
    assert versions == {"v1", "version"}


# ---------------------------------------------------------------- API10


def test_api10_a_provider_that_redirects_is_not_followed() -> None:
    with answering(Answer(200, b"{}")) as (elsewhere, asked):
        moved = Answer(302, b"", {"Location": f"{elsewhere}/keys"})
        with answering(moved) as (url, _):
            given = {"oidc_issuer": url, "oidc_audience": "t", "oidc_roles": {"x": "viewer"}}
            with pytest.raises(Unavailable):
                OIDCVerifier(CoordinatorSettings(**given), Clock(0.0)).principal(token_of_nobody())
        assert asked == []


def token_of_nobody() -> str:
    """A header that names a key, and nothing else that would stand up."""
    return "eyJhbGciOiJSUzI1NiIsImtpZCI6ImEifQ.e30.AA"
