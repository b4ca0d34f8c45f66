"""Workers and coordinators of this version with those of versions before it, as they were recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.client.client import Client
from tessera.shared.run_settings import Training
from tessera.shared.schema import PROTOCOL
from tessera.shared.version import VERSION
from tests.support.coordinator import LiveCoordinator
from tests.support.recording import (
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


def _only_run(coordinator: LiveCoordinator) -> str:
    (run,) = coordinator.client().runs()
    return run.id
