"""A worker that is stopped in the middle of a task: a real coordinator, and one agent after the other in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Training
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.tasks import DIGITS_VIT, untrained

VIT = {**DIGITS_VIT, "hidden_dropout_prob": 0.2}


@contextmanager
def working(settings: WorkerSettings) -> Iterator[None]:
    stop = Stop()
    thread = threading.Thread(target=Agent(settings, stop).run)
    thread.start()
    try:
        yield
    finally:
        stop.request()
        thread.join()


def test_a_stopped_worker_gives_its_task_back_and_resumes_it_under_a_new_token(
    coordinator: LiveCoordinator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = coordinator.client()
    document, start = untrained(VIT, "image-classification")
    # 180 examples one by one: a stop takes effect long before the last of 360 steps.
    run = start_run(
        client, document, start, dataset="digits", rounds=1, training=Training(epochs=2, batch_size=1),
        cohort=Cohort(size=1, max_attempts=1),
    )  # fmt: skip
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=tmp_path / "state",
        datasets={"digits": {"kind": "digits", "part": {"scheme": "iid", "count": 8, "index": 0}}},
        threads=1, poll_seconds=1, checkpoint_minutes=1e-9,  # after each step
    )  # fmt: skip
    vault = tmp_path / "state" / "vault"
    with capture_logs() as logs, working(settings):
        until(lambda: list(vault.glob("*/checkpoint-*.safetensors")))
    assert any(line["event"] == "task-released" for line in logs)
    assert not any(line["event"] == "task-done" for line in logs)
    with working(settings.model_copy(update={"checkpoint_minutes": 10.0})):
        until(lambda: client.run(run.id).state != "running")
    assert client.run(run.id).state == "completed"
    # The executor's log.
    assert capfd.readouterr().out.count('"event": "training-resumed"') == 1
    (task,) = (task for round_ in client.rounds(run.id) for task in round_.tasks)
    assert task.token == 2
    assert list(vault.glob("*/checkpoint-*")) == []
