"""A worker that is killed in the middle of a task resumes it, and sends what it would have sent anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunSpec, Training
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.run_settings import Privacy
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.state.privacy_ledger import Ledger
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, Process, audit_key, start_worker, worker_process

Keep = Callable[[Process], Process]

DIGITS = """
[datasets.digits]
kind = "digits"
"""
OFTEN = 0.002
"""Minutes between two checkpoints."""


def long_run(client: Client, vit: ModelFolder, privacy: Privacy | None) -> Run:
    uploaded = upload_model(client, vit)
    return client.create_run(
        RunSpec(
            name="long",
            method=MethodSpec(name="fedavg"),
            model=uploaded.model,
            version=uploaded.version,
            dataset="digits",
            rounds=1,
            cohort=Cohort(size=1, max_task_attempts=1, max_attempts=1),
            training=Training(epochs=1 if privacy else 3, batch_size=4, learning_rate=1e-3),
            privacy=privacy,
        )
    )


def final_version(
    folder: Path, vit: ModelFolder, running: Keep, kills: int, privacy: Privacy | None = None, devices: int = 1
) -> str:
    """The digest of what a run of one long task ends with. Its worker is killed a few times on the way."""
    # A lease that outlasts the test: the task resumes under it.
    with CoordinatorProcess(folder, lease_seconds=600) as coordinator:
        worker = running(
            worker_process(coordinator, "a", DIGITS, checkpoint_minutes=OFTEN, device="cpu", devices=devices)
        )
        client = coordinator.admin()
        run = long_run(client, vit, privacy)
        for kill in range(kills):
            count = (kill + 1) * 3
            until(lambda: said(worker, "checkpoint") >= count, seconds=100)  # noqa: B023  (it is called here)
            worker.kill()
            worker = running(start_worker(coordinator.folder / "a"))
        until(lambda: client.run(run.id).state != "running", seconds=200)
        assert client.run(run.id).state == "completed"
        (task,) = (task for round_ in client.rounds(run.id) for task in round_.tasks)
        assert (task.attempts, task.token) == (1, 1)
        # Each rank says so.
        assert said(worker, "training-resumed") == kills * devices
        worker.kill()
        return client.run(run.id).version.digest


def said(worker: Process, event: str) -> int:
    """The number of lines about an event in the log of all processes of a worker."""
    return sum(f'"event": "{event}"' in line for line in worker.log.read_text(errors="replace").splitlines())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_worker_killed_in_the_middle_sends_the_same_update(tmp_path: Path, vit: ModelFolder, running: Keep) -> None:
    undisturbed = final_version(tmp_path / "one", vit, running, kills=0)
    assert final_version(tmp_path / "two", vit, running, kills=2) == undisturbed
    left = [path.name for path in (tmp_path / "two" / "a" / "state" / "vault").rglob("*") if path.is_file()]
    assert [name for name in left if "checkpoint" in name or name == "instance"] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_worker_with_two_devices_killed_in_the_middle_sends_the_same_update(
    tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    undisturbed = final_version(tmp_path / "one", vit, running, kills=0, devices=2)
    assert final_version(tmp_path / "two", vit, running, kills=1, devices=2) == undisturbed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_private_task_of_a_killed_worker_is_charged_once(tmp_path: Path, vit: ModelFolder, running: Keep) -> None:
    final_version(tmp_path, vit, running, kills=2, privacy=Privacy(epsilon=4.0, delta=1e-5, clip_norm=1.0))
    entries = Ledger(tmp_path / "a" / "state", audit_key("a")).read("digits")
    assert [event.kind for entry in entries for event in entry.events] == ["noisy-steps"]
