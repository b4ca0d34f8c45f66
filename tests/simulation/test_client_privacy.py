"""Client-level privacy in a simulation: repeatable noise, and the versions that a coordinator makes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tessera.coordinator.db.tables import RoundRow
from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.rounds.client_privacy import CLIP_NORM, EPSILON, simulated_key
from tessera.simulation import Conditions, VirtualSite, Weights, simulate
from tessera.simulation.virtual_sites import WORKER
from tessera.worker.agent import Agent
from tessera.worker.data.registry import load
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.simulation.conftest import SITES
from tests.support.coordinator import LiveCoordinator, until
from tests.support.processes import audit_key

SPEC: dict[str, Any] = {
    "name": "private",
    "dataset": "images",
    "method": {"name": "fedavg"},
    "rounds": 2,
    "seed": 5,
    "training": {"batch_size": 8, "learning_rate": 0.05},
    "cohort": {"size": 3, "quorum": 3},
    "normalization": "cohort",
    "client_privacy": {"epsilon": 50.0, "delta": 1e-5, "clip_norm": 0.1, "clip_quantile": 0.5},
}
SUMMED: dict[str, Any] = {
    **SPEC,
    "name": "in-secret",
    "client_privacy": {"epsilon": 50.0, "delta": 1e-5, "clip_norm": 0.1},
    "secure_sums": {"helpers": list(SITES), "quorum": 3},
}
THREADS = Conditions(threads=1)


def simulated(spec: dict[str, Any], model: Weights, files: dict[str, Path], **changes: Any) -> list[str]:
    """The digests of a simulation's versions, whose sites have the keys of `settings`."""
    data = {site: load("arrays", {"file": file}) for site, file in files.items()}
    sites = {site: VirtualSite(each, audit_key=audit_key(site)) for site, each in data.items()}
    versions = simulate({**spec, **changes}, model, sites, conditions=THREADS).versions
    if spec is SUMMED:
        assert versions[-1].scalars[EPSILON] == pytest.approx(50, rel=1e-6)
    return [version.digest for version in versions]


@pytest.mark.parametrize("spec", [SPEC, SUMMED], ids=lambda spec: spec["name"])
def test_a_simulation_is_repeatable_and_another_seed_gives_other_noise(
    spec: dict[str, Any], model: Weights, files: dict[str, Path]
) -> None:
    first = simulated(spec, model, files)
    assert simulated(spec, model, files) == first
    assert len(set(first)) == 3
    # Without training, only the noise differs.
    still = {"rounds": 1, "training": {"batch_size": 8, "learning_rate": 1e-30, "optimizer": "sgd"}}
    assert simulated(spec, model, files, **still, seed=6)[1] != simulated(spec, model, files, **still)[1]


def test_versions_tell_the_epsilon_and_the_clip_norm(model: Weights, files: dict[str, Path]) -> None:
    sites = {site: load("arrays", {"file": file}) for site, file in files.items()}
    versions = simulate(SPEC, model, sites, conditions=THREADS).versions
    spent = [version.scalars[EPSILON] for version in versions]
    assert spent[0] == 0 < spent[1] < spent[2] <= 50
    assert len({version.scalars[CLIP_NORM] for version in versions}) == 3


@pytest.mark.long
def test_a_coordinator_with_the_simulation_s_keys_makes_the_same_versions(
    tmp_path: Path, model: Weights, files: dict[str, Path]
) -> None:
    with LiveCoordinator(tmp_path) as live:
        agents = [Agent(settings(live, tmp_path, site, file), Stop()) for site, file in files.items()]
        assert [agent._next() for agent in agents] == [None] * 3
        client = live.client()
        uploaded = upload_model(client, model)
        start = {"model": uploaded.model, "version": uploaded.version}
        run = client.create_run(RunSpec.model_validate({**SPEC, **start}))
        for number in (1, 2):
            opened(client, run, number)
            with live.services.database.transaction() as session:
                key = simulated_key(SPEC["seed"], number)
                session.execute(update(RoundRow).where(RoundRow.number == number).values(noise_key=key))
            for agent in agents:
                agent._run_task(until(agent._next))
        until(lambda: client.run(run.id).state == "completed")
        digests = [version.digest for version in client.versions(run.id)]
        for agent in agents:
            agent.close()
    assert digests == simulated(SPEC, model, files)


def opened(client: Client, run: Run, number: int) -> None:
    until(lambda: any(round_.number == number for round_ in client.rounds(run.id)))


def settings(live: LiveCoordinator, folder: Path, site: str, file: Path) -> WorkerSettings:
    return WorkerSettings(
        url=live.url,
        token=live.token("site", site),
        name=WORKER,
        state_dir=folder / site,
        datasets={"images": {"kind": "arrays", "file": str(file)}},
        threads=1,
        poll_seconds=0,
        audit_key=audit_key(site).hex(),
    )
