"""The same run in one process and over HTTP, between real processes: the same versions, to the digest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tessera.shared.api.runs import Measurement, Round, RunSpec
from tessera.shared.client.model_upload import upload_model
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation import Conditions, VirtualSite, simulate
from tessera.simulation.virtual_sites import WORKER
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.data.registry import load
from tessera.worker.governance.policy import Policy
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, Process, audit_key, worker_process
from tests.system.conftest import VIT, made

SITES = {"north": 20, "south": 33, "west": 14}
TEST_EXAMPLES = 40
KEY = key_of_seed(0)
MEASURES_FEW = Policy(min_evaluation_examples=1)


def images(count: int, seed: int) -> dict[str, torch.Tensor]:
    """`pixel_values` float32 [count, 1, 8, 8] and `labels` int64 [count]."""
    dice = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=dice)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (count,), generator=dice)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data of each site, and those that measure versions."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({**SITES, "lab": TEST_EXAMPLES}.items()):
        save_file(images(count, seed), folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in (*SITES, "lab")}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[CoordinatorProcess]:
    """A coordinator, three sites that train and hold a part of their data out, and a laboratory that measures."""
    workers: list[Process] = []
    key = tmp_path_factory.mktemp("key") / "held-out.key"
    key.write_text(KEY.hex())
    with CoordinatorProcess(tmp_path_factory.mktemp("coordinator")) as coordinator:
        try:
            for name, file in files.items():
                measures = name == "lab"
                data, use = ("test", 'use = "evaluate"') if measures else ("images", "held_out = 0.25")
                kinds = ["evaluate"] if measures else ["train", "evaluate"]
                table = f'[datasets.{data}]\nkind = "arrays"\nfile = "{file}"\n{use}\n'
                table += "[policy]\nmin_evaluation_examples = 1\n"
                more = {"name": WORKER, "kinds": kinds, "held_out_key_file": str(key)}
                workers.append(worker_process(coordinator, name, table, **more))
            client = coordinator.admin()
            until(lambda: len(list(client.workers())) == len(files), seconds=60)
            yield coordinator
        finally:
            for worker in workers:
                worker.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model whose dropout draws on the dice of each task."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "vit.json").write_text(json.dumps({**VIT, "hidden_dropout_prob": 0.2}))
    return made(folder, folder / "vit.json")


def sites(files: dict[str, Path]) -> dict[str, VirtualSite]:
    """The sites, with the keys of their workers: without them they would train by other random numbers."""
    data = {name: load("arrays", {"file": files[name]}, held_out=0.25, key=KEY) for name in SITES}
    return {name: VirtualSite(each, audit_key=audit_key(name)) for name, each in data.items()}


TRAINING = {"batch_size": 8, "learning_rate": 0.01}


def measured(measurements: Iterable[Measurement]) -> dict[tuple[int, str], dict[str, float]]:
    """What each version was measured at, by whom: sites, or whoever holds the central data set."""
    return {(one.version, one.site if one.held_out else "central"): one.metrics for one in measurements}


def moved(rounds: Iterable[Round]) -> dict[tuple[int, str], tuple[dict[str, float], int, int]]:
    """What each worker told and moved in each round."""
    tasks = [task for round_ in rounds for task in round_.tasks]
    return {(task.round, task.worker): (task.metrics, task.download_bytes, task.upload_bytes) for task in tasks}


@pytest.mark.long
@pytest.mark.parametrize(
    "wanted",
    [
        {"method": {"name": "fedavg"}, "cohort": {"size": 2, "quorum": 2}},
        {"method": {"name": "fedfrozen", "settings": {"warmup_rounds": 1, "scope": "v_head"}}, "codec": "raw"},
        {"method": {"name": "fedrep"}, "normalization": "cohort"},
        {"method": {"name": "scaffold"}, "training": {**TRAINING, "optimizer": "sgd"}},
        {"method": {"name": "fedavg"}, "server_optimizer": {"kind": "adam"}, "max_examples": 15},
    ],
    ids=["fedavg", "fedfrozen", "fedrep", "scaffold", "adam"],
)
def test_a_simulation_makes_the_versions_that_the_processes_make(
    federation: CoordinatorProcess, model: ModelFolder, files: dict[str, Path], wanted: dict[str, Any]
) -> None:
    spec = {
        "name": "same",
        "dataset": "images",
        "rounds": 3,
        "seed": 7,
        "training": TRAINING,
        "cohort": {"size": 3, "quorum": 3},
        "evaluation": {"dataset": "test", "sites": True},
        **wanted,
    }
    client = federation.admin()
    uploaded = upload_model(client, model)
    run = client.create_run(RunSpec.model_validate({**spec, "model": uploaded.model, "version": uploaded.version}))
    until(lambda: client.run(run.id).state == "completed", seconds=60)
    test = load("arrays", {"file": files["lab"]})
    result = simulate(spec, model, sites(files), test=test, conditions=Conditions(threads=1, policy=MEASURES_FEW))

    over_http = list(client.versions(run.id))
    assert [version.digest for version in result.versions] == [version.digest for version in over_http]
    assert len({version.digest for version in over_http}) == 4
    assert measured(result.measurements) == measured(client.measurements(run.id))
    assert moved(result.rounds) == moved(client.rounds(run.id))
