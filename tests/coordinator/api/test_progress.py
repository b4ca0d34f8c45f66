"""How far tasks are: told with heartbeats, shown with the task, and never a reason to lose a lease."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from tessera.shared.api.tasks import Progress, Task
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

pytestmark = pytest.mark.both_databases(long="postgresql")

MODEL = small_model()


def begun(coordinator: LiveCoordinator, **spec: object) -> tuple[ScriptedWorker, Task]:
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    start_run(coordinator.client(), MODEL, values(MODEL), **spec)
    return worker, worker.take()


def test_what_a_heartbeat_tells_is_shown_with_the_task(coordinator: LiveCoordinator) -> None:
    worker, task = begun(coordinator)
    assert worker.client.task(task.id).progress is None
    told = Progress(phase="training", step=3, steps=8, loss=0.5)
    worker.client.heartbeat(task.id, task.token, told)
    (shown,) = coordinator.client("viewer").round(task.run, 1).tasks
    assert shown.progress == told
    # A heartbeat that says nothing takes nothing back.
    worker.client.heartbeat(task.id, task.token)
    assert worker.client.task(task.id).progress == told


def test_a_new_lease_begins_without_progress(coordinator: LiveCoordinator) -> None:
    worker, task = begun(coordinator)
    worker.client.heartbeat(task.id, task.token, Progress(phase="fetching", bytes=5, total_bytes=10))
    worker.client.release(task.id, task.token)
    worker.instance = "f" * 32
    again = worker.take()
    assert (again.id, worker.client.task(again.id).progress) == (task.id, None)


@pytest.mark.parametrize(
    "told",
    [
        {"phase": "dreaming"},
        pytest.param({"phase": "training", "step": -1}, marks=pytest.mark.long),
        {"phase": "training", "loss": 1e300},
        pytest.param({"phase": "uploading", "bytes": 1 << 60}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
        "training",
        ["training"] * 5_000,
    ],
)
def test_progress_that_cannot_be_read_renews_the_lease_all_the_same(
    standing: LiveCoordinator, site: httpx.Client, task: Task, told: object
) -> None:
    answer = site.post(f"/v1/tasks/{task.id}/heartbeat", json={"token": task.token, "progress": told})
    assert answer.status_code == 200, answer.text
    assert site.get(f"/v1/tasks/{task.id}").json()["progress"] is None


@pytest.fixture
def task(standing: LiveCoordinator) -> Task:
    _worker, task = begun(standing)
    return task


@pytest.fixture
def site(standing: LiveCoordinator) -> httpx.Client:
    return standing.http("site", "a")


def test_fields_of_a_later_version_are_passed_over(coordinator: LiveCoordinator) -> None:
    worker, task = begun(coordinator)
    told = {"phase": "training", "step": 1, "watts": 300}
    coordinator.http("site", "a").post(f"/v1/tasks/{task.id}/heartbeat", json={"token": task.token, "progress": told})
    assert worker.client.task(task.id).progress == Progress(phase="training", step=1)


def test_an_accepted_task_tells_which_layers_its_update_holds(coordinator: LiveCoordinator) -> None:
    worker, task = begun(coordinator, rounds=2)
    base = worker.fetch(task)
    view = worker.submit(task, worker.upload(task, {"head.weight": base["head.weight"] + np.float32(1)}))
    assert view.layers == ()
    second = worker.take()
    assert worker.train(second).layers == ("layer.0",)
    until(lambda: coordinator.client().run(task.run).state == "completed")
