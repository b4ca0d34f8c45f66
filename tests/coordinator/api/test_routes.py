"""Every route there is, for every role: on what is its own, on what is another's, and on what is not there.

The table is the specification. A route that it lacks fails the first test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.routing import BaseRoute, Route

from tessera.coordinator.dossier import signing_key
from tessera.shared.api.admin import EnrolmentSpec, TokenSpec
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.api.tasks import Task
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.client.client import Client
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import PART, announced

ROLES = ("admin", "orchestrator", "viewer", "site", "enrolment", "nobody")

NOWHERE = digest_of(b"nowhere")
DATA = b"an upload"

TOKEN = {"token": 999}
"""The fencing token of no lease."""
DESCRIBED = {"unit": "example", "minimum": 10, "step": 5, "counts": {"classes": [10, 0]}}
REPORT = {**TOKEN, "version": NOWHERE, "examples": 1, "metrics": {}}
CLAIM = {"worker": "idle", "instance": "0" * 32, "datasets": {}}


@dataclass(frozen=True)
class Case:
    """What a request to a route is answered, by role: one status, or those for own, another's and nothing."""

    admin: int | tuple[int, int, int]
    orchestrator: int | tuple[int, int, int]
    viewer: int | tuple[int, int, int]
    site: int | tuple[int, int, int]
    enrolment: int | tuple[int, int, int] = 403
    nobody: int | tuple[int, int, int] = 401
    json: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None


def everybody(status: int) -> Case:
    return Case(status, status, status, status, status, status)


READ = (200, 200, 404)
OWN = (200, 404, 404)
LEASE_LOST = (409, 404, 404)

ROUTES: dict[tuple[str, str], Case] = {
    # Runs: read by all who are no site, steered by who created them, shown to sites that take part.
    ("GET", "/v1/runs"): Case(200, 200, 200, 200),
    ("POST", "/v1/runs"): Case(422, 422, 403, 403, json={}),
    ("POST", "/v1/runs/preview"): Case(422, 422, 403, 403, json={}),
    ("GET", "/v1/runs/{run_id}"): Case(READ, READ, READ, OWN),
    ("PATCH", "/v1/runs/{run_id}"): Case(
        (412, 412, 404), (412, 403, 404), 403, 403, json={"state": "paused"}, headers=(("If-Match", '"0"'),)
    ),
    ("PUT", "/v1/runs/{run_id}/base"): Case(422, 422, 403, 403, json={}),
    ("GET", "/v1/runs/{run_id}/rounds"): Case(READ, READ, READ, 403),
    ("GET", "/v1/runs/{run_id}/rounds/{number}"): Case(READ, READ, READ, 403),
    ("GET", "/v1/runs/{run_id}/versions"): Case(READ, READ, READ, 403),
    ("GET", "/v1/runs/{run_id}/versions/{number}/export"): Case(READ, READ, 403, 403),
    ("GET", "/v1/runs/{run_id}/versions/{number}/dossier"): Case(READ, READ, 403, 403),
    ("GET", "/v1/runs/{run_id}/versions/{number}/difference"): Case(READ, READ, 403, OWN),
    ("GET", "/v1/runs/{run_id}/coverage"): Case(READ, READ, READ, 403),
    ("GET", "/v1/runs/{run_id}/metrics"): Case(READ, READ, READ, 403),
    ("GET", "/v1/runs/{run_id}/reports"): Case(READ, READ, READ, 403),
    # Tasks: a site's own.
    ("GET", "/v1/tasks"): Case(403, 403, 403, 200),
    ("POST", "/v1/tasks/claim"): Case(403, 403, 403, 204, json=CLAIM),
    ("GET", "/v1/tasks/claim"): Case(403, 403, 403, 204),
    ("GET", "/v1/tasks/{task_id}"): Case(READ, READ, READ, OWN),
    ("POST", "/v1/tasks/{task_id}/heartbeat"): Case(403, 403, 403, LEASE_LOST, json=TOKEN),
    ("POST", "/v1/tasks/{task_id}/helper-report"): Case(403, 403, 403, LEASE_LOST, json={"token": 1}),
    ("POST", "/v1/tasks/{task_id}/update"): Case(403, 403, 403, LEASE_LOST, json={**REPORT, "update": NOWHERE}),
    ("POST", "/v1/tasks/{task_id}/evaluation"): Case(403, 403, 403, LEASE_LOST, json=REPORT),
    ("POST", "/v1/tasks/{task_id}/report"): Case(403, 403, 403, LEASE_LOST, json={**TOKEN, "description": DESCRIBED}),
    ("POST", "/v1/tasks/{task_id}/failure"): Case(
        403, 403, 403, LEASE_LOST, json={**TOKEN, "code": "x", "detail": "x"}
    ),
    ("POST", "/v1/tasks/{task_id}/release"): Case(403, 403, 403, LEASE_LOST, json=TOKEN),
    # Bytes: of runs that one has to do with; uploads are their owner's alone.
    ("GET", "/v1/blobs/{digest}"): Case(READ, READ, 403, OWN),
    ("HEAD", "/v1/blobs/{digest}"): Case(READ, READ, 403, OWN),
    ("POST", "/v1/blobs/read"): Case(READ, READ, 403, OWN, json={"digests": ["{digest}"]}),
    ("POST", "/v1/uploads"): Case(
        201, 201, 403, 201, headers=tuple(announced(DATA, complete=True).items()), content=DATA
    ),
    ("HEAD", "/v1/uploads/{upload_id}"): Case((204, 404, 404), (204, 404, 404), 403, (204, 404, 404)),
    ("PATCH", "/v1/uploads/{upload_id}"): Case(
        (204, 404, 404),
        (204, 404, 404),
        403,
        (204, 404, 404),
        headers=(*PART.items(), ("Upload-Offset", "0")),
        content=b"",
    ),
    # Who may come in.
    ("GET", "/v1/sites"): Case(200, 200, 200, 403),
    ("POST", "/v1/sites"): Case(422, 403, 403, 403, json={}),
    ("POST", "/v1/sites/{site_id}/suspend"): Case(READ, 403, 403, 403),
    ("POST", "/v1/sites/{site_id}/resume"): Case(READ, 403, 403, 403),
    ("POST", "/v1/sites/{site_id}/withdraw"): Case(READ, 403, 403, 403),
    ("GET", "/v1/workers"): Case(200, 200, 200, 200),
    ("POST", "/v1/studies"): Case(422, 403, 403, 403, json={}),
    ("GET", "/v1/studies"): Case(200, 200, 200, 403),
    ("GET", "/v1/studies/{study}"): Case(READ, READ, READ, 403),
    ("POST", "/v1/studies/{study}/add"): Case(422, 403, 403, 403, json={}),
    ("POST", "/v1/studies/{study}/remove"): Case(422, 403, 403, 403, json={}),
    ("POST", "/v1/enrolments"): Case(422, 422, 422, 422, 422, 422, json={}),
    ("GET", "/v1/enrolments"): Case(200, 403, 403, 403),
    # Told to whoever holds the secret that it was asked for: none of these does.
    ("GET", "/v1/enrolments/{enrolment_id}"): Case(404, 404, 404, 404, 404, 401),
    ("POST", "/v1/enrolments/{enrolment_id}/approve"): Case(
        (409, 409, 404), 403, 403, 403, json={"code": "x", "site": "a"}
    ),
    ("POST", "/v1/enrolments/{enrolment_id}/decline"): Case((409, 409, 404), 403, 403, 403),
    ("POST", "/v1/tokens/rotate"): Case(403, 403, 403, 422, json={}),
    # The coordinator itself.
    ("POST", "/v1/admin/tokens"): Case(422, 403, 403, 403, json={}),
    ("GET", "/v1/admin/tokens"): Case(200, 403, 403, 403),
    ("DELETE", "/v1/admin/tokens/{token_id}"): Case((204, 204, 404), 403, 403, 403),
    ("POST", "/v1/admin/tokens/{token_id}/rotate"): Case(422, 403, 403, 403, json={}),
    ("GET", "/v1/admin/audit"): Case(200, 403, 403, 403),
    ("GET", "/v1/admin/audit/names"): Case(200, 403, 403, 403),
    ("GET", "/v1/admin/status"): Case(200, 200, 200, 403),
    ("GET", "/metrics"): Case(200, 200, 200, 403),
    ("GET", "/healthz/live"): everybody(204),
    ("GET", "/healthz/ready"): everybody(200),
    ("GET", "/version"): everybody(200),
    ("GET", "/problems"): everybody(200),
    ("GET", "/problems/{code}"): everybody(200),
    ("GET", "/openapi.json"): Case(200, 200, 200, 200),
}


STREAMS = {("GET", "/v1/events"), ("GET", "/v1/runs/{run_id}/events")}
"""What does not end by itself: tests/coordinator/notify/test_events.py asks for these."""


@dataclass(frozen=True)
class World:
    """Two sites, two orchestrators, and a run of each with one of the sites. 'Own' is what is site a's, or the first
    orchestrator's."""

    live: LiveCoordinator
    https: dict[str, httpx.Client]
    uploads: dict[str, str]
    objects: dict[str, tuple[str, str, str]]
    """By the name that a path has for it: one's own, another's, and nothing."""
    answers: dict[tuple[str, str, str, int], httpx.Response] = field(default_factory=dict)

    def ask(self, role: str, method: str, path: str, which: int) -> httpx.Response:
        """Send a request once. Return its first answer to every later call."""
        # Requests that name no object are the same for all three.
        key = (role, method, path, which if "{" in path or path == "/v1/blobs/read" else 0)
        if key not in self.answers:
            self.answers[key] = self._ask(*key)
        return self.answers[key]

    def _ask(self, role: str, method: str, path: str, which: int) -> httpx.Response:
        case = ROUTES[method, path]
        named = {name: three[which] for name, three in self.objects.items()}
        named["upload_id"] = (self.uploads.get(role, "none"), self.uploads["other"], "none")[which]
        named["number"] = "1" if "export" not in path else "latest"
        json = {"digests": [named["digest"]]} if path == "/v1/blobs/read" else case.json
        body: dict[str, Any] = {"content": case.content} if case.content is not None else {"json": json}
        at = path.format(**named, code="not-found")
        params = {"since": "0"} if path.endswith("difference") else None
        return self.https[role].request(method, at, headers=dict(case.headers), params=params, **body)


def begun(creator: Client, site: Client, name: str, seed: int) -> tuple[Run, Task]:
    """A run with one site alone, one round of which is done and another under way."""
    model = small_model()
    run = start_run(creator, model, values(model, seed), rounds=2, cohort=Cohort(sites=(name,)))
    worker = ScriptedWorker(site)
    worker.train(worker.take())
    return run, worker.take()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    key = signing_key.create(tmp_path_factory.mktemp("keys") / "key.pem").path
    with LiveCoordinator(tmp_path_factory.mktemp("world"), auth_failures_per_minute=10_000, signing_key=key) as live:
        admin = live.client()
        secrets = {role: live.token(role) for role in ("admin", "orchestrator", "viewer")}  # type: ignore[arg-type]
        secrets["site"] = live.token("site", "a")
        spare = admin.create_site("spare")
        admin.create_site("joining")
        one_time = TokenSpec(name="t", role="enrolment", site="joining", uses=1, expires_in_days=1)
        secrets["enrolment"] = admin.issue_token(one_time).secret
        creator = Client(live.url, secrets["orchestrator"], verify=False)
        site = Client(live.url, secrets["site"], verify=False)
        own = begun(creator, site, "a", 1)
        other = begun(live.client("orchestrator"), live.client("site", "b"), "b", 2)
        with Client(live.url, verify=False) as stranger:
            wish = EnrolmentSpec(site="a", worker="w", secret_hash=hash_of(new_secret("site")))
            asked = stranger.ask_to_join(wish)
        admin.decline(asked.id)
        revoked = admin.issue_token(TokenSpec(name="spare", role="viewer"))
        https = {role: live.bare({"Authorization": f"Bearer {secret}"}) for role, secret in secrets.items()}
        https["nobody"] = live.bare()
        senders = {**https, "other": live.http("site", "b")}
        uploads = {role: announce(senders[role]) for role in ("admin", "orchestrator", "site", "other")}
        objects = {
            "run_id": (own[0].id, other[0].id, "none"),
            "task_id": (own[1].id, other[1].id, "none"),
            "digest": (own[0].version.digest, other[0].version.digest, NOWHERE),
            "study": ("default", "default", "none"),
            "site_id": (spare.id, spare.id, "none"),
            "enrolment_id": (asked.id, asked.id, "none"),
            "token_id": (revoked.id, revoked.id, "none"),
        }
        yield World(live, https, uploads, objects)
        for client in (creator, site):
            client.close()


def announce(http: httpx.Client) -> str:
    """An upload of nothing yet; its id."""
    location: str = http.post("/v1/uploads", headers=announced(b"unfinished")).headers["Location"]
    return location.rpartition("/")[2]


def served(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """The method and path of each route, also of those within routers; without the page's, which bearer tokens do not
    reach: tests/coordinator/dashboard/test_login.py."""
    for route in routes:
        if within := getattr(route, "original_router", None):
            yield from served(within.routes)
        elif getattr(route, "path", "") != "/" and not getattr(route, "path", "").startswith("/page"):
            assert isinstance(route, Route), route
            yield from ((method, route.path) for method in route.methods or ())


def test_the_table_has_every_route_that_there_is(standing: LiveCoordinator) -> None:
    there = set(served(standing.app().routes))
    assert there == {*ROUTES, *STREAMS}
    described = standing.http("viewer").get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path, methods in described.items() for method in methods} < there


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_do_what_the_table_says_and_nothing_else(world: World, role: str) -> None:
    wrong = []
    for (method, path), case in ROUTES.items():
        expected = getattr(case, role)
        statuses = expected if isinstance(expected, tuple) else (expected,) * 3
        found = tuple(world.ask(role, method, path, which).status_code for which in range(3))
        if found != statuses:
            wrong.append((method, path, "expected", statuses, "found", found))
    assert wrong == []


@pytest.mark.parametrize("role", ROLES[:-1])
def test_a_role_that_is_not_admitted_is_told_which_is(world: World, role: str) -> None:
    for (method, path), case in ROUTES.items():
        if getattr(case, role) == 403 and method != "HEAD":
            assert f"yours has role {role}" in refused(world.ask(role, method, path, 0), 403, "forbidden").detail


def test_what_is_another_s_is_refused_in_the_words_for_what_is_not_there(world: World) -> None:
    names = {name for three in world.objects.values() for name in three} | set(world.uploads.values()) | {"none"}
    for (method, path), case in ROUTES.items():
        if isinstance(case.site, tuple) and case.site[1:] == (404, 404) and method != "HEAD":
            told = [refused(world.ask("site", method, path, which), 404, "not-found").detail for which in (1, 2)]
            for name in sorted(names, key=len, reverse=True):
                told = [text.replace(name, "") for text in told]
            assert told[0] == told[1], (method, path)


def test_nobody_is_told_which_challenge_to_answer(world: World) -> None:
    for (method, path), case in ROUTES.items():
        if case.nobody == 401:
            assert world.ask("nobody", method, path, 0).headers["WWW-Authenticate"] == "Bearer", (method, path)


# ---------------------------------------------------------------- what lists and views hold


def items(world: World, role: str, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.https[role].get(path).json()["items"]
    return found


def test_a_site_s_lists_hold_its_own_and_nothing_of_others(world: World) -> None:
    own, other, _ = world.objects["run_id"]
    assert {run["id"] for run in items(world, "viewer", "/v1/runs")} == {own, other}
    assert [run["id"] for run in items(world, "site", "/v1/runs")] == [own]
    assert {worker["site"] for worker in items(world, "viewer", "/v1/workers")} == {"a", "b"}
    assert {worker["site"] for worker in items(world, "site", "/v1/workers")} == {"a"}
    tasks = items(world, "site", "/v1/tasks")
    assert {task["worker"] for task in tasks} == {"a/w"}
    assert {task["run"] for task in tasks} == {own}
    assert items(world, "site", f"/v1/tasks?run={other}") == []


def test_a_site_is_told_of_no_other_site_in_its_runs(coordinator: LiveCoordinator) -> None:
    admin, model = coordinator.client(), small_model()
    mine, theirs = (ScriptedWorker(coordinator.client("site", name)).enrol() for name in ("mine", "theirs"))
    run = start_run(admin, model, values(model), cohort=Cohort(sites=("mine", "theirs"), quorum=2))
    task = mine.take()
    assert "theirs" not in task.model_dump_json()
    theirs.take()
    admin.set_run_state(run.id, "paused")
    shown = mine.client._transport.request("GET", f"/v1/runs/{run.id}").content
    assert b"theirs" not in shown
    assert mine.client.run(run.id).spec.cohort.sites == ("mine",)
    assert mine.client.run(run.id).state == "paused"
    assert admin.run(run.id).spec.cohort.sites == ("mine", "theirs")


# ---------------------------------------------------------------- runs have owners and guests


def test_an_orchestrator_steers_the_runs_that_it_created_and_an_administrator_all(
    coordinator: LiveCoordinator,
) -> None:
    creator, other, admin = (coordinator.client(role) for role in ("orchestrator", "orchestrator", "admin"))
    model = small_model()
    run = start_run(creator, model, values(model))
    with pytest.raises(Exception, match="was created by another caller"):
        other.set_run_state(run.id, "cancelled")
    # Orchestrators see each other's runs all the same: decision 27.
    assert other.run(run.id).state == "running"
    assert creator.set_run_state(run.id, "paused").state == "paused"
    assert admin.set_run_state(run.id, "running").state == "running"


def test_a_site_that_was_not_invited_gets_neither_tasks_nor_bytes(coordinator: LiveCoordinator) -> None:
    admin, model = coordinator.client(), small_model()
    both: tuple[Any, ...] = ("train", "evaluate")
    holdings = {"datasets": {"data": 10, "central": 10}, "held_out": {"data": 5}}
    invited, other = (
        ScriptedWorker(coordinator.client("site", name), kinds=both, **holdings).enrol()
        for name in ("invited", "other")
    )
    evaluation = {"dataset": "central", "sites": True}
    run = start_run(admin, model, values(model), cohort=Cohort(sites=("invited",)), evaluation=evaluation)
    seen = []
    while admin.run(run.id).state == "running":
        assert other.claim(0) is None
        if task := invited.claim(0):
            seen.append((task.kind, task.held_out))
            invited.train(task) if task.kind == "train" else invited.evaluate(task, accuracy=1.0)
    assert set(seen) == {("train", False), ("evaluate", False), ("evaluate", True)}
    assert until(lambda: admin.run(run.id).state == "completed")
    blobs = [run.spec.model, run.version.digest, admin.run(run.id).version.digest]
    blobs += admin.manifest(run.version.digest).digests
    assert [digest for digest in blobs if other.client.has_blob(digest)] == []
    assert [digest for digest in blobs if not invited.client.has_blob(digest)] == []
    assert list(other.client.tasks()) == list(other.client.runs()) == []
    assert admin.status().runs == {"completed": 1}
