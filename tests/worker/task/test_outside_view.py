"""What the coordinator sees of a private task is the same whatever one of its examples is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tessera.shared.api.runs import Cohort, Privacy, Training
from tessera.shared.api.tasks import Task, TaskView
from tessera.shared.model.spec import Model
from tessera.shared.run_settings import Unit
from tessera.shared.schema import EPSILON
from tessera.worker.agent import Agent
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.settings import WorkerSettings
from tessera.worker.stores import ledger_of
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run

VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_labels": 10,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
PLACE = 5
ODD: dict[str, tuple[str, float]] = {
    "not a number": ("pixel_values", float("nan")),
    "infinite": ("pixel_values", float("inf")),
    "overflowing": ("pixel_values", 3e38),
    "of a class that the model lacks": ("labels", 99),
    "of a class below zero": ("labels", -7),
}


def images(odd: tuple[str, float] | None) -> dict[str, torch.Tensor]:
    """Sixteen images in four groups, one of which is odd."""
    drawn = torch.Generator().manual_seed(0)
    data = {
        "pixel_values": torch.randn(16, 1, 8, 8, generator=drawn),
        "labels": torch.arange(16) % 10,
        "group": torch.arange(16) % 4,
    }
    if odd:
        name, value = odd
        data[name][PLACE] = value
    return data


def worked(
    coordinator: LiveCoordinator, folder: Path, site: str, odd: tuple[str, float] | None, unit: Unit
) -> tuple[TaskView, Any]:
    """A private task at a site with these images, and what its ledger has."""
    save_file(images(odd), folder / f"{site}.safetensors")
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", site), name="w", state_dir=folder / site, threads=1,
        poll_seconds=5, datasets={"scans": {"kind": "arrays", "file": str(folder / f"{site}.safetensors")}},
    )  # fmt: skip
    model = instantiate(VIT, "image-classification", seed=1)
    document = Model(config=VIT, head="image-classification", blocks=block_table(model))
    start = {block.name: read_block(named_tensors(model), block) for block in document.blocks}
    agent, client = Agent(settings, Stop()), coordinator.client()
    run = start_run(
        client,
        document,
        start,
        dataset="scans",
        codec="raw",
        cohort=Cohort(sites=(site,)),
        # All examples are in each step, so that the odd one is.
        training=Training(steps=8, batch_size=None, optimizer="sgd", learning_rate=1e-3),
        privacy=Privacy(clip_norm=1.0, epsilon=8.0, delta=1e-2, unit=unit),
    )
    task: Task = until(agent._next)
    agent._run_task(task)
    agent.close()
    until(lambda: client.run(run.id).state == "completed")
    (entry,) = ledger_of(settings).read("scans")
    return client.task(task.id), (entry.unit, entry.examples, entry.events)


def seen(task: TaskView) -> dict[str, Any]:
    """All that the coordinator has of a task, but for its names, its times and the noisy update."""
    assert task.progress is not None
    progress = task.progress.model_dump(exclude={"phase_seconds"})
    return {
        **task.model_dump(include={"state", "problem", "examples", "upload_bytes", "attempts", "token", "layers"}),
        "metrics": sorted(task.metrics),
        "epsilon": task.metrics[EPSILON],
        "progress": progress,
    }


@pytest.mark.parametrize("unit", ["example", "group"])
def test_no_odd_example_changes_what_the_coordinator_sees(
    coordinator: LiveCoordinator, tmp_path: Path, unit: Unit
) -> None:
    plain, spent = worked(coordinator, tmp_path, "plain", None, unit)
    expected = seen(plain)
    assert (expected["state"], expected["problem"], expected["progress"]["loss"]) == ("merged", None, None)
    for number, (what, odd) in enumerate(ODD.items()):
        task, ledger = worked(coordinator, tmp_path, f"odd-{number}", odd, unit)
        assert seen(task) == expected, what
        assert ledger == spent, what
