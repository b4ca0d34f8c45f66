"""What is little goes along with a task, and is believed for nothing but its bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tessera.coordinator.operations import tasks
from tessera.shared.api.tasks import Task
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import digest_of
from tessera.worker import agent
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.tapping import Tap
from tests.worker.test_agent import VIT, begin, succeed, working

SMALL, LARGE = small_model(width=4), small_model(width=200)
LARGE_VIT = {**VIT, "hidden_size": 64, "intermediate_size": 256}
"""Of 200 kB, more than comes with a task or a submission."""


def worker_of(coordinator: LiveCoordinator) -> ScriptedWorker:
    return ScriptedWorker(coordinator.client("site", "a")).enrol()


def lacking(coordinator: LiveCoordinator, task: Task, model: Model) -> set[str]:
    """The blocks of the task's version that did not come along."""
    along = {digest_of(data) for data in task.inline_blobs}
    manifest = coordinator.client().manifest(task.version.digest)
    assert along <= {task.version.digest, *manifest.blocks.values()}
    assert not along or task.version.digest == digest_of(task.inline_blobs[0])
    return {block.name for block in model.blocks if manifest.blocks[block.name] not in along}


def test_a_small_version_comes_with_its_task_and_later_what_is_new_in_it(coordinator: LiveCoordinator) -> None:
    client, worker = coordinator.client(), worker_of(coordinator)
    start_run(client, SMALL, values(SMALL), rounds=2)
    first = worker.take()
    assert not lacking(coordinator, first, SMALL)
    # One block moves; the others are what they were, and go along no more.
    moved = SMALL.blocks[0].name
    worker.submit(first, worker.upload(first, {moved: worker.fetch(first)[moved] + 1}))
    assert lacking(coordinator, worker.take(), SMALL) == {block.name for block in SMALL.blocks[1:]}


def test_of_a_large_version_its_manifest_comes_along(coordinator: LiveCoordinator) -> None:
    worker = worker_of(coordinator)
    start_run(coordinator.client(), LARGE, values(LARGE))
    task = worker.take()
    assert [digest_of(data) for data in task.inline_blobs] == [task.version.digest]


def test_nothing_of_a_version_with_a_large_manifest_comes_along(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, submission_bytes=300) as coordinator:
        worker = worker_of(coordinator)
        start_run(coordinator.client(), SMALL, values(SMALL))
        assert worker.take().inline_blobs == ()


def test_a_worker_asks_three_times_for_a_round_of_a_large_model(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    with Tap(coordinator.url) as tap:
        with working(coordinator, tmp_path, url=tap.url):
            run = begin(client, LARGE_VIT, rounds=2)
            until(lambda: client.run(run.id).state == "completed")
        asked = re.findall(rb"(GET|POST|PATCH|HEAD) (/v1/\S+) HTTP/1\.1\r\n", bytes(tap.up))
    # A task sends heartbeats too if a busy machine slows it.
    paths = [path for _, path in asked if not path.endswith(b"/heartbeat")]
    first, second = [place for place, path in enumerate(paths) if path.endswith(b"/update")]
    # The model's document once; then a claim, the blocks or their difference from the last version, and the
    # submission with the update behind it.
    assert paths[:first][-2:] == [f"/v1/blobs/{run.spec.model}".encode(), b"/v1/blobs/read"]
    difference = f"/v1/runs/{run.id}/versions/1/difference?since=0".encode()
    assert paths[first + 1 : second] == [b"/v1/tasks/claim", difference]


def test_a_worker_fetches_nothing_that_came_along(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("copy_blob", "copy_blobs"):
        real = getattr(agent.Client, name)

        def counted(self: object, wanted: object, *more: object, real: object = real) -> None:
            asked.append(str(wanted))
            real(self, wanted, *more)  # type: ignore[operator]

        monkeypatch.setattr(agent.Client, name, counted)
    client = coordinator.client()
    with working(coordinator, tmp_path):
        run = begin(client, rounds=2)
        until(lambda: client.run(run.id).state == "completed")
    # The model's document, once; the model is one of 13 kB.
    assert asked == [run.spec.model]
    tasks_done = [task for round_ in client.rounds(run.id) for task in round_.tasks]
    assert all(task.download_bytes > 10_000 for task in tasks_done)


def test_bytes_that_are_nothing_of_the_version_change_nothing(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = coordinator.client()
    with working(coordinator, tmp_path / "honest"):
        honest = begin(client, rounds=2)
        until(lambda: client.run(honest.id).state == "completed")
    lies = iter([(b"junk", b""), (bytes(2 << 20),)])
    monkeypatch.setattr(tasks, "_inline_blobs", lambda *_: next(lies, ()))
    succeed(tmp_path / "honest/state", tmp_path / "lied-to/state")
    with working(coordinator, tmp_path / "lied-to"):
        run = begin(client, rounds=2)
        until(lambda: client.run(run.id).state == "completed")
    assert client.run(run.id).version.digest == client.run(honest.id).version.digest
