"""Tasks of a worker that keeps its bases in 4 bits: what it trains, what it refuses, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tessera.shared.api.runs import Evaluation, Run, Training
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.tensors.lazy import from_bytes
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.agent import Agent
from tessera.worker.cli.model import app as model_app
from tessera.worker.compute import Compute
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.model.four_bits import four_bit_layers
from tessera.worker.task.environment import TaskEnvironment
from tessera.worker.task.heartbeat import Stop
from tessera.worker.task.resumption import key_of
from tessera.worker.training.setup import TrainingSetup
from tests.support.chain_rows import audit_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.in_process import in_process
from tests.support.tasks import CPU
from tests.worker.task.test_checkpoint_key import env, task
from tests.worker.task.test_external_base import Site, begin, site, snapshot, start

__all__ = ["env", "site", "snapshot", "start"]

FOUR = {"compute": {"base_bits": 4}}
QUICK = Training(steps=3, batch_size=8)


def init(snapshot: Path, out: Path, *words: str) -> ModelFolder:
    given = ["init", str(out), "--config", str(snapshot), "--head", "image-classification", *words]
    result = CliRunner().invoke(model_app, given)
    assert result.exit_code == 0, result.output
    return ModelFolder.open(out)


def adapters(client: Client, run: Run, model: ModelFolder) -> np.ndarray:
    """The last version's adapters, in one row."""
    digests = client.manifest(client.run(run.id).version.digest).blocks
    found = [block for block in model.model.stored if block.role == "adapter"]
    return np.concatenate([from_bytes(client.read_blob(digests[block.name]), block.dtype) for block in found])


def test_adapters_learn_nearly_the_same_beside_a_base_in_4_bits(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, start: ModelFolder, tmp_path: Path
) -> None:
    client, found = coordinator.client(), []
    for name, more in (("whole", {}), ("rounded", FOUR)):
        one = site(base_sources=(str(snapshot),), **more)
        run = begin(client, start, name=name, training=QUICK)
        assert one.task(client, run).metrics.get("base_bits") == (4.0 if more else None)
        until(lambda run=run: client.run(run.id).state == "completed")
        found.append(adapters(client, run, start))
    whole, rounded = found
    assert 0 < np.linalg.norm(rounded - whole) < 0.1 * np.linalg.norm(whole)
    begun = [entry.detail for entry in audit_in(tmp_path / "state").read() if entry.action == "task.start"]
    assert [detail.get("base_bits") for detail in begun] == [None, 4]


def test_matrices_are_converted_once_for_all_tasks_of_a_run(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, tmp_path: Path
) -> None:
    client, model = coordinator.client(), init(snapshot, tmp_path / "whole", "--lora-rank", "2")
    run = begin(client, model, training=QUICK, evaluation=Evaluation(sites=True))
    settings = site(**FOUR).settings
    executor, packed = in_process(settings), []
    agent = Agent(settings, Stop(), executor=executor)
    # The evaluation of the first version, its training, and the evaluation of the second.
    for _ in range(3):
        agent._run_task(until(agent._next))
        built = executor.cache.models._last
        assert built
        packed.append({name: layer.packed.data_ptr() for name, layer in four_bit_layers(built.model).items()})
    agent.close()
    assert [each.metrics["base_bits"] for each in client.measurements(run.id)] == [4.0, 4.0]
    # Three layers with query, key, value, output and two of the mlp.
    assert len(packed[0]) == 3 * 6
    assert packed[0] == packed[1] == packed[2]


@pytest.mark.parametrize(
    ("words", "method", "told"),
    [
        (
            ("--lora-rank", "2"),
            MethodSpec(name="fedavg"),
            "the plan trains 18 blocks of a base that this worker keeps",
        ),
        pytest.param(
            ("--lora-rank", "2"),
            MethodSpec(name="safl"),
            "the plan trains 18 blocks of a base that this worker keeps",
            marks=pytest.mark.long,
        ),
        ((), MethodSpec(name="fedavg"), "the model has none"),
        (
            ("--lora-rank", "2"),
            MethodSpec(name="lora", settings={"average": "stack"}),
            "each round changes 6 blocks of a base that this worker keeps in 4 bits",
        ),
    ],
)
def test_a_run_that_needs_the_base_as_it_is_is_refused_with_the_way_out(
    coordinator: LiveCoordinator,
    site: Callable[..., Site],
    snapshot: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    method: MethodSpec,
    told: str,
) -> None:
    client, model = coordinator.client(), init(snapshot, tmp_path / "whole", *words)
    training = QUICK.model_copy(update={"full_fine_tuning": bool(words) and method.name != "lora"})
    ended = site(**FOUR).task(client, begin(client, model, method=method, training=training))
    assert ended.problem
    assert told in ended.problem.detail
    assert "remove base_bits from [compute]" in ended.problem.detail


def test_a_private_run_trains_beside_a_base_in_4_bits(
    coordinator: LiveCoordinator, site: Callable[..., Site], snapshot: Path, start: ModelFolder
) -> None:
    client = coordinator.client()
    privacy = {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0}
    run = begin(client, start, training=QUICK, privacy=privacy)
    ended = site(base_sources=(str(snapshot),), **FOUR).task(client, run)
    assert ended.problem is None, ended.problem
    assert ended.metrics["base_bits"] == 4.0


def test_a_checkpoint_of_a_base_in_4_bits_is_another(env: TaskEnvironment) -> None:
    four = replace(env, executor=Direct({}, TrainingSetup(CPU, compute=Compute(base_bits=4))))
    assert key_of(env, task()) != key_of(four, task())
    assert key_of(env, task()).device == "cpu"
