"""Batches in pieces: what is refused for them is refused before the version is fetched."""

from __future__ import annotations

from pathlib import Path

from tessera.shared.api.runs import Training
from tessera.shared.methods.base import MethodSpec
from tessera.shared.tensors.lazy import as_bytes, digest_of
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import eighth_of_digits
from tests.support.federation import start_run
from tests.support.tasks import DIGITS_VIT, untrained

# Of more than a megabyte: small versions come with their task.
VIT = {**DIGITS_VIT, "hidden_size": 256, "intermediate_size": 256}


def test_losses_that_do_not_add_up_are_refused_before_the_version_is_fetched(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    document, start = untrained(VIT, "image-classification", seed=1)
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=tmp_path / "state", threads=1,
        poll_seconds=5, micro_batch=4, datasets={"digits": eighth_of_digits(tmp_path)},
    )  # fmt: skip
    agent = Agent(settings, Stop())
    training = Training(batch_size=8, class_weights=(2.0,) * 10)
    client = coordinator.client()
    start_run(client, document, start, dataset="digits", method=MethodSpec(name="moon"), training=training)
    task = until(agent._next)
    agent._run_task(task)
    shelf = agent._runner.shelf
    agent.close()
    problem = client.task(task.id).problem
    assert problem
    assert problem.detail.startswith("unsuited: this worker trains batches in pieces of 4 examples (micro_batch)")
    assert not any(digest_of(as_bytes(values)) in shelf for values in start.values())
