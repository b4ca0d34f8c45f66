"""Collections in pages, whose cursors hold while rows are added."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tessera.coordinator.api import runs
from tessera.coordinator.auth.permissions import reading
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.studies import join
from tessera.coordinator.domain.principal import Principal
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import MethodSpec
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.storage import add_round, add_run, add_task, add_worker, statements


def pages(http: httpx.Client, path: str, limit: int) -> list[list[dict[str, object]]]:
    found, cursor = [], None
    while True:
        page = http.get(path, params={"limit": limit, **({"cursor": cursor} if cursor else {})}).json()
        found.append(page["items"])
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def test_pages_together_are_the_collection_in_its_order(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    for number in range(7):
        http.post("/v1/sites", json={"name": f"s{number}"})
    found = pages(http, "/v1/sites", 3)
    assert [len(page) for page in found] == [3, 3, 1]
    assert [site["name"] for page in found for site in page] == [f"s{n}" for n in range(7)]
    # A last page that is full has no successor.
    assert [len(page) for page in pages(http, "/v1/sites", 7)] == [7]


def test_a_cursor_neither_skips_nor_repeats_while_rows_are_added(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    for name in ("b", "d", "f", "h"):
        http.post("/v1/sites", json={"name": name})
    first = http.get("/v1/sites", params={"limit": 2}).json()
    for name in ("a", "c", "e", "i"):
        http.post("/v1/sites", json={"name": name})
    rest = http.get("/v1/sites", params={"limit": 9, "cursor": first["next_cursor"]}).json()
    # Behind d come those that were there and those that came; what came before d is not shown twice.
    assert [s["name"] for s in first["items"]] == ["b", "d"]
    assert [s["name"] for s in rest["items"]] == ["e", "f", "h", "i"]


def test_every_collection_pages_one_by_one(coordinator: LiveCoordinator) -> None:
    client, http, model = coordinator.client(), coordinator.http(), small_model()
    run = start_run(client, model, values(model), rounds=2)
    start_run(client, model, values(model), dataset="none")
    for name in "ab":
        coordinator.token("site", name)
    worker = ScriptedWorker(coordinator.client("site", "a"))
    ScriptedWorker(coordinator.client("site", "b"), datasets={}).enrol()
    for _ in range(2):
        worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    at_least = {
        "/v1/runs": 2,
        "/v1/sites": 2,
        "/v1/workers": 2,
        "/v1/admin/tokens": 4,
        "/v1/admin/audit": 10,
        f"/v1/runs/{run.id}/rounds": 2,
        f"/v1/runs/{run.id}/versions": 2,
    }
    for path, count in at_least.items():
        singles = [page[0] for page in pages(http, path, 1)]
        assert len(singles) >= count, path
        assert singles == http.get(path).json()["items"], path


@pytest.mark.parametrize(
    "cursor",
    ["x", "====", "ü", base64.urlsafe_b64encode(b'["a", "b"]').decode(), base64.urlsafe_b64encode(b"\xff").decode()],
)
def test_a_cursor_of_another_collection_or_of_none_is_refused(standing: LiveCoordinator, cursor: str) -> None:
    answer = standing.http().get("/v1/sites", params={"cursor": cursor})
    assert "Begin without a cursor" in refused(answer, 400, "bad-request").remedy


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/admin/audit", "/v1/admin/tokens"])
def test_a_cursor_with_values_of_another_kind_is_refused(standing: LiveCoordinator, path: str) -> None:
    for text in (b'"a"', b'["a"]', b'["a", "b"]', b"[1.0, 2.0]", b'[NaN, "b"]', b"[" * 200, b"[1%s]" % (b"0" * 30)):
        cursor = base64.urlsafe_b64encode(text).decode()
        refused(standing.http().get(path, params={"cursor": cursor}), 400, "bad-request")


@pytest.mark.parametrize("part", ["rounds", "versions", "metrics"])
def test_the_parts_of_a_run_that_is_not_there_are_not_an_empty_page(standing: LiveCoordinator, part: str) -> None:
    refused(standing.http().get(f"/v1/runs/nothing/{part}"), 404, "not-found")


SITE, VIEWER = Principal("t", "site", "site", "site"), Principal("v", "viewer", "viewer", None)
NONE = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("collection", "caller"),
    [(runs.list_runs, VIEWER), (runs.list_runs, SITE), (lambda *of: runs.list_rounds("0", *of), VIEWER)],
    ids=["runs", "runs of a site", "rounds"],
)
def test_a_page_takes_as_many_statements_for_many_rows_as_for_one(
    database: Database, collection: Callable[..., Any], caller: Principal
) -> None:
    spec = RunSpec(name="x", method=MethodSpec(name="fedavg"), model=NONE, version=NONE, dataset="data", rounds=1)
    with database.transaction() as session:
        join(session, "token", "v", ["default"])
        for name in "vw":
            add_worker(session, name)
        for number in range(9):
            add_run(session, str(number)).spec = spec.model_dump(mode="json")
            add_round(session, "0", number + 1, state="committed")
            for name in "wv":
                of = {"round_id": f"0-{number + 1}-1", "run_id": str(number), "version_number": number}
                add_task(session, f"{number}{name}", name, "merged", **of)

    def page(limit: int) -> tuple[Any, int]:
        with statements(database) as seen:
            found = collection(
                SimpleNamespace(database=database, reading=partial(reading, database)), caller, limit, None
            )
        return found.items, len(seen)

    (_, once), (items, often) = page(1), page(9)
    assert (len(items), often) == (9, once)
    if hasattr(items[0], "tasks"):
        assert [[task.worker for task in one.tasks] for one in items] == [["site/v", "site/w"]] * 9
