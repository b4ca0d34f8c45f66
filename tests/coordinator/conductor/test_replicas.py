"""Several coordinators on one PostgreSQL, one blob store and one staging folder: whichever is asked, the answer is
the same (invariants I7 and I13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.coordinator.db import audit
from tessera.coordinator.db import engine as module
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.tasks import Submission
from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, MethodSpec, State
from tessera.shared.methods.registry import methods
from tessera.shared.tensors.lazy import digest_of
from tests.support import databases
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import PART, announced


@pytest.fixture(scope="module", autouse=True)
def database_kind() -> Iterator[str]:
    if databases.CHOSEN == "sqlite":
        pytest.skip("TESSERA_TEST_DATABASE rules PostgreSQL out")
    with databases.running_on("postgresql"):
        yield "postgresql"


Pair = tuple[LiveCoordinator, LiveCoordinator]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two for all tests of the module, each of which has sites and runs of its own."""
    shared = tmp_path_factory.mktemp("shared")
    with LiveCoordinator(shared) as one, LiveCoordinator(shared) as other:
        for replica in (one, other):
            # The framework makes ready what a route needs at its first request, and not in two threads at once.
            replica.http("viewer").get("/openapi.json").raise_for_status()
        yield one, other


def at_both(replicas: Pair, token: str) -> tuple[httpx.Client, httpx.Client]:
    """Bare clients of the two with the same token."""
    one, other = (replica.bare({"Authorization": f"Bearer {token}"}) for replica in replicas)
    return one, other


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives when that many do it at the same moment."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_a_repeated_request_gets_the_first_answer_from_any_replica(replicas: Pair) -> None:
    both = at_both(replicas, replicas[0].token("admin"))

    def create(number: int) -> httpx.Response:
        return both[number % 2].post("/v1/sites", json={"name": "new"}, headers={"Idempotency-Key": "one-wish"})

    answers = at_once(8, create)
    assert {(answer.status_code, answer.text) for answer in answers} == {(201, answers[0].text)}
    assert [site["name"] for site in both[1].get("/v1/sites").json()["items"]].count("new") == 1
    refused(
        both[1].post("/v1/sites", json={"name": "b"}, headers={"Idempotency-Key": "one-wish"}),
        422,
        "idempotency-key-reused",
    )


def test_an_upload_that_broke_off_at_one_goes_on_at_another(replicas: Pair) -> None:
    one, other = at_both(replicas, replicas[0].token("orchestrator"))
    data = bytes(range(256)) * 1000
    location = one.post("/v1/uploads", headers=announced(data)).headers["Location"]
    partial = {**PART, "Upload-Complete": "?0"}
    half = len(data) // 2
    assert one.patch(location, content=data[:half], headers={**partial, "Upload-Offset": "0"}).status_code == 204
    assert other.head(location).headers["Upload-Offset"] == str(half)
    rest = {**partial, "Upload-Offset": str(half), "Upload-Complete": "?1"}
    assert other.patch(location, content=data[half:], headers=rest).headers["Upload-Complete"] == "?1"
    assert one.get(f"/v1/blobs/{digest_of(data)}").content == data


def test_what_several_announce_and_send_at_once_is_one_blob(replicas: Pair) -> None:
    clients = [replicas[number % 2].client("orchestrator") for number in range(8)]
    data = bytes(range(256)) * 1000
    assert len(set(at_once(8, lambda number: clients[number].put_bytes(data)))) == 1
    assert clients[0].read_blob(clients[0].put_bytes(data)) == data


def test_an_update_that_both_are_handed_at_once_counts_once(replicas: Pair) -> None:
    client, model = replicas[0].client(), small_model()
    secret = replicas[0].token("site", "c")
    worker = ScriptedWorker(replicas[0].client("site", "c"), datasets={"once": 10}).enrol()
    run = start_run(client, model, values(model), dataset="once")
    task = until(lambda: worker.claim(0))
    digest = worker.upload(task, {name: array + 1 for name, array in values(model).items()})
    submission = Submission(token=task.token, version=task.version.digest, update=digest, examples=10)
    both = at_both(replicas, secret)

    def submit(number: int) -> int:
        return (
            both[number % 2].post(f"/v1/tasks/{task.id}/update", json=submission.model_dump(mode="json")).status_code
        )

    assert set(at_once(6, submit)) == {200}
    until(lambda: client.run(run.id).state == "completed")
    accepted = [entry for entry in client.audit() if (entry.action, entry.run) == ("task.accept", run.id)]
    assert len(accepted) == 1
    with replicas[1].services.database.snapshot() as session:
        assert audit.broken_at(session) is None


merges: list[int] = []


class Counted(CoordinatorHalf[MethodSettings]):
    """Averages, and notes down each time it is asked to."""

    def merge(self, state: State, updates: Any) -> State:
        merges.append(state.round)
        return super().merge(state, updates)


@pytest.fixture
def counted() -> Iterator[str]:
    methods()["counted"] = Method("counted", coordinator=Counted, source="a test")
    merges.clear()
    yield "counted"
    del methods()["counted"]


def test_two_conductors_merge_each_round_once(replicas: Pair, counted: str) -> None:
    client, model = replicas[0].client(), small_model()
    workers = [
        ScriptedWorker(replica.client("site", site), methods=(counted,)).enrol()
        for replica, site in zip(replicas, "ab", strict=True)
    ]
    cohort = Cohort(size=2, quorum=2)
    run = start_run(client, model, values(model), method=MethodSpec(name=counted), cohort=cohort, rounds=5)

    def train(number: int) -> None:
        for _ in range(5):
            workers[number].train(until(lambda: workers[number].claim(0)))

    at_once(2, train)
    until(lambda: client.run(run.id).state == "completed")
    assert merges == [0, 1, 2, 3, 4]
    # Each attempt is the first: none was opened twice, and none abandoned.
    assert [round_.state for round_ in client.rounds(run.id)] == ["committed"] * 5


def test_a_caller_is_asked_to_wait_when_the_database_does_not_answer_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 1)
    with LiveCoordinator(tmp_path) as live:
        http = live.http()
        elsewhere = module.Database(live.settings.database_url)
        with elsewhere.transaction() as session:
            session.connection()
            answer = http.post("/v1/sites", json={"name": "a"})
        refused(answer, 503, "unavailable")
        assert answer.headers["Retry-After"] == "1"
        assert http.post("/v1/sites", json={"name": "a"}).status_code == 201
        elsewhere.close()
