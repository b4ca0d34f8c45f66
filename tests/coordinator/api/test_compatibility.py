"""Workers and coordinators of this version with those of versions before it, as they were recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from tessera.coordinator.api import tasks as api
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.framing import pack_task
from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client
from tessera.shared.client.transport import NotUnderstood
from tessera.shared.methods.base import Method, MethodSettings, MethodSpec
from tessera.shared.methods.registry import methods
from tessera.shared.run_settings import Training
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import VERSION
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, start_run
from tests.support.recording import (
    MODEL,
    START,
    Recorded,
    Recorder,
    Replay,
    begin,
    conversation,
    lacking,
    read,
    recordings,
    through,
)

EACH = pytest.mark.parametrize("recording", recordings(), ids=lambda path: path.stem)


def test_the_version_before_this_one_is_recorded() -> None:
    versions = {path.stem for path in recordings()}
    assert versions
    for path in recordings():
        whose, exchanges = read(path)
        assert whose["version"] == path.stem
        assert whose["protocol"] in (PROTOCOL - 1, PROTOCOL)
        assert len(exchanges) > 20


@EACH
def test_a_worker_of_then_finds_all_that_it_read_in_the_answers_of_now(
    recording: Path, coordinator: LiveCoordinator
) -> None:
    _, exchanges = read(recording)
    start = begin(coordinator)
    replay = Replay(coordinator.http("site", "a"))
    missed: list[str] = []
    enrolled = 0
    for exchange in exchanges:
        if exchange["request"]["path"] == "/v1/tasks/claim":
            enrolled += 1
            # Both of its workers are known by then, as they were.
            if enrolled == 3:
                start()
        missed += replay.step(exchange)
    assert missed == []
    states = [task.state for round_ in coordinator.client().rounds(_only_run(coordinator)) for task in round_.tasks]
    assert states[:2] == ["merged", "merged"]
    assert "failed" in states


@EACH
def test_a_worker_of_now_reads_the_answers_of_then(recording: Path) -> None:
    _, exchanges = read(recording)
    recorded = Recorded(exchanges)
    with through(Client("http://then.example", "token", patience_seconds=0, verify=False), recorded) as client:
        tasks = conversation(client, lambda: None)
    assert recorded.misses == []
    assert recorded.over
    assert [task.kind for task in tasks] == ["train", "train", "evaluate", "train", "train"]
    assert [task.round for task in tasks if task.kind == "train"] == [1, 1, 2, 3]


def test_all_that_a_worker_asks_for_is_in_the_recording(coordinator: LiveCoordinator) -> None:
    """Recorded anew, it has the same exchanges: else the recording of this version is to be made again."""
    recorder = Recorder()
    conversation(through(coordinator.client("site", "a"), recorder), begin(coordinator))
    _, exchanges = read(next(path for path in recordings() if path.stem == VERSION))

    def shape(exchange: dict[str, Any]) -> tuple[str, str, int]:
        asked = exchange["request"]
        return asked["method"], asked["path"].split("/")[2], exchange["answer"]["status"]

    assert [shape(exchange) for exchange in recorder.exchanges] == [shape(exchange) for exchange in exchanges]


def without_a_field(task: dict[str, Any]) -> None:
    del task["lease_seconds"]


def with_another_kind(task: dict[str, Any]) -> None:
    task["token"] = str(task["token"])


def without_a_field_within(task: dict[str, Any]) -> None:
    del task["version"]["digest"]


def with_more_in_the_plan(task: dict[str, Any]) -> None:
    task["plan"]["novelty"] = 1


def with_a_schedule(task: dict[str, Any]) -> None:
    given = Training.model_validate(task["training"]).model_dump() | {"schedule": "cosine"}
    task["training"] = Training.model_validate(given).model_dump(mode="json", exclude_defaults=True)


@pytest.mark.parametrize(
    "change", [without_a_field, with_another_kind, without_a_field_within, with_more_in_the_plan, with_a_schedule]
)
def test_what_a_worker_of_then_would_trip_over_is_found(change: Callable[[dict[str, Any]], None]) -> None:
    _, exchanges = read(recordings()[0])
    task = next(
        e["answer"]["json"] for e in exchanges if e["request"]["path"].endswith("/claim") and "json" in e["answer"]
    )
    assert lacking(task, task) == []
    changed = copy.deepcopy(task)
    changed["colour"] = "blue"
    assert lacking(task, changed) == []
    change(changed)
    assert lacking(task, changed) != []


@pytest.mark.parametrize(("lowest", "highest"), [(PROTOCOL + 1, PROTOCOL + 2), (0, PROTOCOL - 1)])
def test_a_claim_whose_protocols_exclude_ours_is_refused_with_what_is_spoken(
    coordinator: LiveCoordinator, lowest: int, highest: int
) -> None:
    _, exchanges = read(recordings()[0])
    claim = next(e["request"] for e in exchanges if e["request"]["path"].endswith("/claim"))
    http = coordinator.http("site", "a")
    answer = http.post(claim["path"], json=claim["json"] | {"protocol_min": lowest, "protocol_max": highest})
    assert answer.status_code == 422
    problem = answer.json()
    assert (
        problem["detail"] == f"this coordinator speaks protocol {PROTOCOL}; the worker speaks {lowest} to {highest}"
    )
    # Both may be builds of one version.
    assert f"The {'worker' if highest < PROTOCOL else 'coordinator'} is older" in problem["remedy"]
    assert VERSION not in problem["remedy"]
    assert http.get("/version").json()["protocol_max"] == PROTOCOL
    assert not list(coordinator.client().workers())
    assert http.post(claim["path"], json=claim["json"] | {"protocol_max": PROTOCOL + 8}).status_code == 204


class Newer(MethodSettings):
    strength: float = Field(default=0.0, json_schema_extra={"since": "0.1.0"})


@pytest.fixture
def newer() -> Iterator[str]:
    """A method with a setting that workers before 0.1.0 do not know, while the test lasts."""
    methods()["newer"] = Method("newer", settings=Newer, source="a test")
    yield "newer"
    del methods()["newer"]


def test_a_worker_that_is_too_old_for_a_run_is_told_before_it_and_in_its_preview(
    coordinator: LiveCoordinator, newer: str
) -> None:
    workers = {
        site: ScriptedWorker(coordinator.client("site", site), methods=(newer,), version=version).enrol()
        for site, version in (("old", "0.0.9"), ("same", VERSION), ("later", "0.2.0.dev1"), ("silent", ""))
    }
    client = coordinator.client()
    remedy = "have the site install 0.1.0 or later, or leave method.strength out"
    said = {
        "old/w": f"its version of Tessera, 0.0.9, does not know method.strength: {remedy}",
        "silent/w": f"its version of Tessera, which it does not say, does not know method.strength: {remedy}",
    }
    run = start_run(
        client, MODEL, START, method=MethodSpec(name=newer, settings={"strength": 1.0}), cohort=Cohort(quorum=2)
    )
    found = client.preview_run(run.spec)
    assert {one.worker: [(no.rule, no.detail) for no in one.ineligibilities] for one in found.workers} == {
        worker: [("version", said[worker])] if worker in said else []
        for worker in ("later/w", "old/w", "same/w", "silent/w")
    }
    workers["same"].take()
    workers["later"].take()
    for site in ("old", "silent"):
        assert workers[site].claim(0) is None
        assert workers[site].client.left_out == f"test: {said[f'{site}/w']}"
    client.set_run_state(run.id, "cancelled")
    assert workers["old"].claim(0) is None
    assert workers["old"].client.left_out is None
    # With the setting at its default, all take part.
    start_run(client, MODEL, START, method=MethodSpec(name=newer), cohort=Cohort(quorum=4))
    assert {worker.take().run_name for worker in workers.values()} == {"test"}


def test_a_task_that_a_worker_cannot_read_fails_at_once_with_the_remedy(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = ScriptedWorker(coordinator.client("site", "a")).enrol(), coordinator.client()

    def of_a_newer_coordinator(task: Task) -> bytes:
        return pack_task(task).replace(b'"plan":{}', b'"plan":{"novelty":1}')

    monkeypatch.setattr(api, "pack_task", of_a_newer_coordinator)
    run = start_run(client, MODEL, START)
    with pytest.raises(NotUnderstood, match="not a valid Task"):
        worker.take()
    task, *_ = (task for found in client.rounds(run.id) for task in found.tasks if task.state == "failed")
    assert task.problem
    assert "invalid-task" in task.problem.detail
    assert "plan" in task.problem.detail
    assert "novelty" in task.problem.detail
    assert "install the same at both" in task.problem.remedy


def _only_run(coordinator: LiveCoordinator) -> str:
    (run,) = coordinator.client().runs()
    return run.id
