"""Secure sums between real processes: what the run computes, and what is lost when helpers are killed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import save_file

from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.secure_sums.messages import fingerprint
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation import Conditions, VirtualSite, simulate
from tessera.simulation.virtual_sites import WORKER
from tessera.worker.data.registry import load as load_data
from tessera.worker.state.site_keys import KEYS_FOLDER, Keyring
from tests.support.cli import tessera
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, Process, audit_key, start_worker, worker_process
from tests.system.test_learning import RATE, central_descent, images

Keep = Callable[[Process], Process]
SITES = {"north": 8, "south": 24, "east": 40, "west": 16}
WEIGHTS = {name: count // 8 for name, count in SITES.items()}
PARTS = {name: images(count, seed) for seed, (name, count) in enumerate(SITES.items())}


def started(live: CoordinatorProcess, running: Keep, tmp_path: Path, *, masked: bool = True) -> dict[str, Process]:
    """Four sites that have compared their fingerprints, all of them helpers. Only if `masked` they require masks."""
    roster = {}
    for name in SITES:
        folder = live.folder / name / "state" / KEYS_FOLDER
        folder.parent.mkdir(parents=True)
        roster[name] = fingerprint(Keyring(folder).identity().public)
    lines = [f'{name} = "{known}"' for name, known in roster.items()]
    workers = {}
    for name, part in PARTS.items():
        file = tmp_path / f"{name}.safetensors"
        save_file(part, file)
        tables = [
            f'[datasets.images]\nkind = "arrays"\nfile = "{file}"',
            f'[secure_sums]\nsite = "{name}"\nquorum = 3\nhelper = true\nweight = {WEIGHTS[name]}',
            "[secure_sums.roster]",
            *lines,
            f"[policy]\nrequire_secure_sums = {str(masked).lower()}\n",
        ]
        workers[name] = running(worker_process(live, name, "\n".join(tables), name=WORKER))
    return workers


def settings(rounds: int, **cohort: int) -> dict[str, Any]:
    return {
        "name": "in-secret",
        "method": {"name": "fedavg"},
        "dataset": "images",
        "rounds": rounds,
        "cohort": {"size": 4, "quorum": 3, **cohort},
        "secure_sums": {"helpers": list(SITES), "quorum": 3},
        "training": {
            "epochs": 1,
            "batch_size": None,
            "optimizer": "sgd",
            "learning_rate": RATE,
            "weight_decay": 0,
        },
    }


def begun(client: Client, vit: ModelFolder, spec: dict[str, Any]) -> Run:
    uploaded = upload_model(client, vit)
    return client.create_run(RunSpec(model=uploaded.model, version=uploaded.version, **spec))


def test_a_secure_sum_is_gradient_descent_on_all_data_and_tells_no_site_s_figures(
    live: CoordinatorProcess, vit: ModelFolder, running: Keep, tmp_path: Path
) -> None:
    started(live, running, tmp_path)
    client = live.admin()
    spec = settings(rounds=2, quorum=4)
    run = begun(client, vit, spec)
    until(lambda: client.run(run.id).state == "completed", seconds=60)

    file = io.BytesIO()
    client.export(run.id, file)
    together = {name: torch.cat([part[name] for part in PARTS.values()]) for name in PARTS["north"]}
    expected = central_descent(vit, together, steps=2)
    for name, merged in load(file.getvalue()).items():
        np.testing.assert_allclose(merged, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
    tasks = [task for round_ in client.rounds(run.id) for task in round_.tasks]
    assert len(tasks) == 8
    assert all(task.metrics == {} and task.state == "merged" for task in tasks)
    assert all(task.progress is None or task.progress.loss is None for task in tasks)
    # Each site sent two updates, and signed and opened sums as a helper.
    for name in SITES:
        compared = tessera("audit", "compare", "--config", str(live.folder / name / "worker.toml"), "--json")
        found = json.loads(compared.stdout)
        assert found["differences"] == []
        assert found["agreed"] > 2

    sites = {
        name: VirtualSite(
            load_data("arrays", {"file": tmp_path / f"{name}.safetensors"}),
            weight=weight,
            audit_key=audit_key(name),
        )
        for name, weight in WEIGHTS.items()
    }
    result = simulate(spec, vit, sites, conditions=Conditions(threads=1))
    assert [one.digest for one in result.versions] == [one.digest for one in client.versions(run.id)]


@pytest.fixture
def attentive(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator that soon notices who is gone."""
    settings = {"liveness_seconds": 15, "cohort_wait_seconds": 0}
    with CoordinatorProcess(tmp_path / "coordinator", **settings) as coordinator:
        yield coordinator


@pytest.mark.long
def test_a_helper_killed_for_good_and_one_that_comes_back_cost_no_bit(
    attentive: CoordinatorProcess, vit: ModelFolder, running: Keep, tmp_path: Path
) -> None:
    live = attentive
    workers = started(live, running, tmp_path)
    client = live.admin()
    run = begun(client, vit, settings(rounds=3, quorum=3, target_updates=3))
    until(lambda: client.run(run.id).version.number >= 1, seconds=60)
    workers["west"].kill()
    workers["south"].kill()
    # Of four helpers three must sign: the round waits for one of the two.
    running(start_worker(live.folder / "south"))
    until(lambda: client.run(run.id).state == "completed", seconds=240)
    assert client.run(run.id).version.number == 3
