"""Client-level privacy in secure sums: a simulation makes the versions that real sites make, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.shared.api.runs import RunSpec
from tessera.shared.cli.upload import upload_model
from tessera.shared.rounds.client_privacy import EPSILON
from tessera.shared.secure_sums.messages import fingerprint
from tessera.worker.agent import Agent
from tessera.worker.data.registry import load
from tessera.worker.model.build import instantiate
from tessera.worker.settings import WorkerSettings
from tessera.worker.simulation import Conditions, Weights, simulate
from tessera.worker.simulation.secure_sums import noise_key_of
from tessera.worker.simulation.virtual_sites import WORKER
from tessera.worker.state.site_keys import KEYS_FOLDER, Keyring
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.tasks import VIT

SITES = ("north", "south", "east")
SPEC: dict[str, Any] = {
    "name": "in-secret",
    "dataset": "images",
    "method": {"name": "fedavg"},
    "rounds": 2,
    "seed": 5,
    "training": {"batch_size": 8, "learning_rate": 0.05},
    "cohort": {"size": 3, "quorum": 3},
    "normalization": "cohort",
    "client_privacy": {"epsilon": 50.0, "delta": 1e-5, "clip_norm": 0.1},
    "secure_sums": {"helpers": list(SITES), "quorum": 3},
}
THREADS = Conditions(threads=1)


@pytest.fixture(scope="module")
def model() -> Weights:
    return Weights.of(instantiate(VIT, "image-classification", seed=1), VIT, "image-classification")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sixteen random images of three classes at each site."""
    folder = tmp_path_factory.mktemp("data")
    for seed, site in enumerate(SITES):
        dice = torch.Generator().manual_seed(seed)
        pixels, labels = torch.randn(16, 1, 8, 8, generator=dice), torch.randint(0, 3, (16,), generator=dice)
        save_file({"pixel_values": pixels, "labels": labels}, folder / f"{site}.safetensors")
    return {site: folder / f"{site}.safetensors" for site in SITES}


def simulated(model: Weights, files: dict[str, Path], **changes: Any) -> list[str]:
    sites = {site: load("arrays", {"file": file}) for site, file in files.items()}
    versions = simulate({**SPEC, **changes}, model, sites, conditions=THREADS).versions
    assert versions[-1].scalars[EPSILON] == pytest.approx(50, rel=1e-6)
    return [version.digest for version in versions]


def test_a_simulation_is_repeatable_and_another_seed_gives_other_noise(
    model: Weights, files: dict[str, Path]
) -> None:
    first = simulated(model, files)
    assert simulated(model, files) == first
    assert len(set(first)) == 3
    # Without training, only the noise differs.
    still = {"training": {"batch_size": 8, "learning_rate": 1e-30, "optimizer": "sgd"}}
    assert simulated(model, files, **still, seed=6)[1] != simulated(model, files, **still)[1]


def test_a_site_whose_training_fails_sends_noise_alone(
    model: Weights, files: dict[str, Path], tmp_path: Path
) -> None:
    """Else a version that fails where some word occurs would ask a site whether it has the word."""
    broken = load_file(files["east"])
    broken["pixel_values"][0] = 3e38
    save_file(broken, tmp_path / "broken.safetensors")
    digests = simulated(model, files)
    found = simulated(model, {**files, "east": tmp_path / "broken.safetensors"})
    assert len(found) == len(digests)
    assert found[1] != digests[1]


@pytest.mark.long
def test_sites_with_the_simulation_s_keys_make_the_same_versions(
    tmp_path: Path, model: Weights, files: dict[str, Path]
) -> None:
    roster = {}
    for site in SITES:
        (tmp_path / site).mkdir()
        roster[site] = fingerprint(Keyring(tmp_path / site / KEYS_FOLDER).identity().public)
    with LiveCoordinator(tmp_path) as live:
        agents = [Agent(settings(live, tmp_path, site, file, roster), Stop()) for site, file in files.items()]
        for agent in agents:
            assert agent._next() is None
            # The masks are real ones, and cancel.
            assert agent._runner.sums is not None
            agent._runner = replace(agent._runner, sums=replace(agent._runner.sums, noise_key=noise_key_of))
        client = live.client()
        uploaded = upload_model(client, model)
        start = {"model": uploaded.model, "version": uploaded.version}
        run = client.create_run(RunSpec.model_validate({**SPEC, **start}))

        def over() -> bool:
            for agent in agents:
                if task := agent._next():
                    agent._run_task(task)
            return client.run(run.id).state == "completed"

        until(over, seconds=120)
        digests = [version.digest for version in client.versions(run.id)]
        for agent in agents:
            agent.close()
    assert digests == simulated(model, files)


def settings(live: LiveCoordinator, folder: Path, site: str, file: Path, roster: dict[str, str]) -> WorkerSettings:
    return WorkerSettings(
        url=live.url,
        token=live.token("site", site),
        name=WORKER,
        state_dir=folder / site,
        datasets={"images": {"kind": "arrays", "file": str(file)}},
        secure_sums={"site": site, "helper": True, "quorum": 3, "roster": roster},
        policy={"require_client_privacy": {"epsilon": 50.0, "delta": 1e-5}},
        threads=1,
        poll_seconds=0,
    )
