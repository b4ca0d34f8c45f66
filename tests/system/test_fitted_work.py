"""Fitted work between real processes, one of which is slow: who makes how many steps, and what is merged."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load
from safetensors.torch import save_file

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec, Training
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import FOLDERS
from tessera.shared.updates.model_folder import ModelFolder
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, Process, worker_process
from tests.system.test_learning import RATE, central_descent, images

PAUSES = {"quick": 0.0, "slow": 2.0}
"""Seconds that a site's worker sleeps in each step."""
COUNTS = {"quick": 8, "slow": 24}
STEPS = 2
"""Over many more steps, rounding grows."""

SLOWED = """
import os
import time

from tessera.shared.methods.base import Method, WorkerHalf


class SlowedWorker(WorkerHalf):
    def after_backward(self, context):
        time.sleep(float(os.environ["PAUSE_SECONDS"]))


METHOD = Method(name="slowed", worker=SlowedWorker, source="a test")
"""


def tensors_of(client: Client, run: str, number: int) -> dict[str, np.ndarray]:
    file = io.BytesIO()
    client.export(run, file, number)
    return load(file.getvalue())


@pytest.mark.long
def test_a_slow_site_makes_fewer_steps_which_are_merged_by_fednova_s_formula(
    tmp_path: Path,
    vit: ModelFolder,
    running: Callable[[Process], Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = tmp_path / "methods"
    methods.mkdir()
    (methods / "slowed.py").write_text(SLOWED)
    monkeypatch.setenv(FOLDERS, str(methods))
    parts = {name: images(count, seed) for seed, (name, count) in enumerate(COUNTS.items())}
    with CoordinatorProcess(tmp_path / "coordinator", lease_seconds=600) as live:
        for name, part in parts.items():
            file = tmp_path / f"{name}.safetensors"
            save_file(part, file)
            monkeypatch.setenv("PAUSE_SECONDS", str(PAUSES[name]))
            running(worker_process(live, name, f'[datasets.images]\nkind = "arrays"\nfile = "{file}"\n'))
        client = live.admin()
        uploaded = upload_model(client, vit)
        spec = RunSpec(
            name="fitted",
            method=MethodSpec(name="slowed"),
            model=uploaded.model,
            version=uploaded.version,
            dataset="images",
            rounds=2,
            cohort=Cohort(size=2, quorum=2, work="fitted", work_factor=2),
            training=Training(steps=STEPS, batch_size=None, optimizer="sgd", learning_rate=RATE, weight_decay=0),
        )
        run = client.create_run(spec)
        until(lambda: client.run(run.id).state == "completed", seconds=120)
        made = {
            (round_.number, task.worker.partition("/")[0]): int(task.metrics["effective_steps"])
            for round_ in client.rounds(run.id)
            for task in round_.tasks
        }
        versions = [tensors_of(client, run.id, number) for number in range(3)]

    assert [made[1, name] for name in COUNTS] == [STEPS, STEPS]
    # The slow site takes 4 s or more for two steps.
    assert [made[2, name] for name in COUNTS] == [4, 1]
    whole = sum(COUNTS.values())
    effective = sum(count * made[2, name] for name, count in COUNTS.items()) / whole
    trained = {name: central_descent(vit, parts[name], made[2, name], versions[1]) for name in COUNTS}
    for name, before in versions[1].items():
        steps = [
            COUNTS[site] / whole * effective * (values[name] - before) / made[2, site]
            for site, values in trained.items()
        ]
        np.testing.assert_allclose(versions[2][name], before + sum(steps), rtol=1e-3, atol=1e-5, err_msg=name)
