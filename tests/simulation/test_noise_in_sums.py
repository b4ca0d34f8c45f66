"""Client-level privacy in secure sums: a simulation makes the versions that real sites make, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from tessera.shared.api.runs import RunSpec
from tessera.shared.client.model_upload import upload_model
from tessera.shared.secure_sums.messages import fingerprint
from tessera.shared.tensors.lazy import Array, to_array
from tessera.simulation import Weights, simulate
from tessera.simulation.engine import Stalled
from tessera.simulation.result import Result
from tessera.simulation.secure_sums import noise_key_of
from tessera.simulation.virtual_sites import WORKER
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset, Padding, schema_of
from tessera.worker.data.registry import load
from tessera.worker.model.build import instantiate
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.site_keys import KEYS_FOLDER, Keyring
from tessera.worker.task.heartbeat import Stop
from tests.simulation.conftest import SITES
from tests.simulation.test_client_privacy import SUMMED, THREADS, simulated
from tests.support.coordinator import LiveCoordinator, until
from tests.support.processes import audit_key
from tests.support.tasks import VIT


def test_a_site_whose_training_fails_sends_noise_alone(
    model: Weights, files: dict[str, Path], tmp_path: Path
) -> None:
    """Else a version that fails where some word occurs would ask a site whether it has the word."""
    broken = load_file(files["east"])
    broken["pixel_values"][0] = 3e38
    save_file(broken, tmp_path / "broken.safetensors")
    digests = simulated(SUMMED, model, files, rounds=1)
    found = simulated(SUMMED, model, {**files, "east": tmp_path / "broken.safetensors"}, rounds=1)
    assert len(found) == len(digests)
    assert found[1] != digests[1]


# A batch of all examples: in a sum, sites draw other batches than without.
EXACT = {
    **{name: value for name, value in SUMMED.items() if name != "client_privacy"},
    "rounds": 1,
    "training": {**SUMMED["training"], "batch_size": 16},
}
ODD: dict[str, tuple[str, slice, float]] = {
    "a pixel beyond float32": ("pixel_values", slice(0, 1), 3e38),
    "a pixel that is not a number": ("pixel_values", slice(0, 1), float("nan")),
    "a class that the model lacks": ("labels", slice(0, 1), 99),
    "no label that counts": ("labels", slice(None), -100),
}


def values_of(result: Result) -> dict[str, Array]:
    return {name: to_array(tensor) for name, tensor in result.state().model.items()}


@pytest.mark.parametrize("what", ODD)
def test_a_site_whose_training_fails_sends_zeros_into_an_exact_sum_and_says_nothing_else(
    model: Weights, files: dict[str, Path], tmp_path: Path, what: str
) -> None:
    """Else a version that fails at some example would ask a named site whether it has the example."""
    name, place, value = ODD[what]
    broken = load_file(files["east"])
    broken[name][place] = value
    save_file(broken, tmp_path / "broken.safetensors")
    found = []
    for file in (files["east"], tmp_path / "broken.safetensors"):
        sites = {site: load("arrays", {"file": each}) for site, each in {**files, "east": file}.items()}
        with capture_logs() as logs:
            result = simulate(EXACT, model, sites, conditions=THREADS)
        tasks = [task for task in result.outcomes[0].round.tasks if task.kind == "train"]
        seen = [task.model_dump(include={"worker", "state", "problem", "examples", "metrics"}) for task in tasks]
        found.append((seen, values_of(result), [log["event"] for log in logs if log["log_level"] == "error"]))
    (plain, whole, _), (odd, without, logged) = found
    assert odd == plain
    assert {(task["state"], str(task["metrics"])) for task in odd} == {("merged", "{}")}
    assert logged == ["update-without-step"]
    # The sites have equally many examples, and the step of one of them is missing in the mean of three.
    alone = {"north": files["north"], "south": files["south"]}
    sites = {site: load("arrays", {"file": file}) for site, file in alone.items()}
    plain_run = {name: value for name, value in EXACT.items() if name != "secure_sums"}
    others = values_of(simulate({**plain_run, "cohort": {}}, model, sites, conditions=THREADS))
    for block, start in model.values.items():
        expected = start + (others[block] - start) * 2 / 3
        # The softmax cancels the biases of keys: their gradients are rounding errors, which Adam scales up.
        assert block.endswith("k_proj.bias") or np.allclose(without[block], expected, atol=2e-5), block
    assert any(not np.allclose(whole[block], without[block], atol=2e-5) for block in whole)


def test_a_model_that_is_too_short_for_the_settings_is_refused_whatever_a_site_s_longest_text_is() -> None:
    """Else a model of few positions would ask each site whether it has a text of more tokens."""
    config = {
        "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": 20, "max_position_embeddings": 12, "num_labels": 2,
    }  # fmt: skip
    model = Weights.of(instantiate(config, "text-classification"), config, "text-classification")
    found = []
    for longest in (8, 14):
        sites = {}
        for site, width in zip(SITES, (8, 8, longest), strict=True):
            tensors = {"input_ids": torch.full((2, width), 5), "labels": torch.tensor([0, 1])}
            schema = schema_of(tensors, {"input_ids": (16,), "labels": ()})
            sites[site] = Dataset(tensors, padding=Padding(16, {"input_ids": 0}), schema=schema)
        with pytest.raises(Stalled, match="0 of 3 updates came") as refusal:
            simulate({**EXACT, "name": "short"}, model, sites, conditions=THREADS)
        found.append(str(refusal.value))
    assert found[0] == found[1]


def test_a_site_whose_training_fails_reports_the_same_of_a_private_run(files: dict[str, Path]) -> None:
    """Else a submission without an epsilon would tell of the failure, which may depend on its data."""
    sites = {site: load("arrays", {"file": file}) for site, file in files.items()}
    config = {**VIT, "num_hidden_layers": 1}
    model = Weights.of(instantiate(config, "image-classification", seed=1), config, "image-classification")
    privacy = {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1e-6}
    found = []
    # With the second, each step makes the weights 99 times as large.
    for decay in (0.0, 1.0):
        training = {"epochs": 11, "batch_size": 8, "optimizer": "sgd", "learning_rate": 100, "weight_decay": decay}
        spec = {**SUMMED, "privacy": privacy, "rounds": 1, "training": training}
        result = simulate(spec, model, sites, conditions=THREADS)
        tasks = [task for task in result.outcomes[0].round.tasks if task.kind == "train"]
        found.append({task.worker: (task.examples, task.metrics) for task in tasks})
        assert all(task.metrics.keys() == {"epsilon"} for task in tasks)
    assert found[0] == found[1]


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
        run = client.create_run(RunSpec.model_validate({**SUMMED, **start}))

        def over() -> bool:
            for agent in agents:
                if task := agent._next():
                    agent._run_task(task)
            return client.run(run.id).state == "completed"

        until(over, seconds=120)
        digests = [version.digest for version in client.versions(run.id)]
        for agent in agents:
            agent.close()
    assert digests == simulated(SUMMED, model, files)


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
        audit_key=audit_key(site).hex(),
    )
