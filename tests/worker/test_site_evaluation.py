"""A site measures each version as it is and as its own: a real coordinator, a real agent, real methods."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from shared.client import Client
from shared.methods import Chosen
from shared.model import Model, Prompts
from shared.wire import Cohort, Evaluation, Measurement, Run, Training
from tests.support.coordinator import LiveCoordinator, until
from tests.support.duals import dual, pairs
from tests.support.federation import ScriptedWorker, start_run
from worker.agent import Agent
from worker.blockmap import block_table, named_tensors
from worker.cache import Cache
from worker.data import Dataset
from worker.evaluator import evaluate
from worker.models import instantiate, read_block
from worker.renewal import Stop
from worker.report import Report
from worker.settings import Settings, datasets_of
from worker.trainer import Batches
from worker.vault import Vault
from worker.workbench import Workbench

VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_labels": 10,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CPU = torch.device("cpu")
GLOBAL = {"accuracy", "macro_f1", "loss", "calibration_error"}
PERSONAL = {f"personal_{name}" for name in GLOBAL}
ROUNDS = 2


def begin(client: Client, method: str, evaluation: Evaluation | None, **settings: Any) -> Run:
    model = instantiate(VIT, "image-classification", seed=0)
    blocks = block_table(model)
    start = {block.name: read_block(named_tensors(model), block) for block in blocks}
    document = Model(config=VIT, head="image-classification", blocks=blocks)
    return start_run(
        client,
        document,
        start,
        method=Chosen(name=method, settings=settings),
        dataset="digits",
        rounds=ROUNDS,
        training=Training(optimizer="sgd", momentum=0, learning_rate=0.1, batch_size=64),
        cohort=Cohort(tries=1, task_tries=1),
        evaluation=evaluation,
    )


def settings(coordinator: LiveCoordinator, folder: Path, held_out: float | None = 0.25) -> Settings:
    part = {"scheme": "iid", "count": 8, "index": 0}
    digits = {"kind": "digits", "part": part} | ({"held_out": held_out} if held_out else {})
    token = coordinator.token("site", "a")
    given = {"url": coordinator.url, "token": token, "name": "w", "state_dir": folder, "threads": 1}
    return Settings(**given, datasets={"digits": digits})


@contextmanager
def working(given: Settings) -> Iterator[None]:
    stop = Stop()
    thread = threading.Thread(target=Agent(given, stop).run)
    thread.start()
    try:
        yield
    finally:
        stop.request()
        thread.join(20)


def measured(client: Client, run: Run) -> dict[int, Measurement]:
    until(lambda: client.run(run.id).state == "completed")
    return {found.version: found for found in client.measurements(run.id)}


@pytest.mark.parametrize(
    ("method", "chosen", "personal_from"),
    [
        # A vault that only steers training makes no model of the site's own.
        ("fedavg", {}, None),
        ("scaffold", {}, None),
        # What the vault holds does, once there is something in it;
        ("fedper", {}, 1),
        ("ditto", {}, 1),
        ("local", {}, 1),
        # fine-tuning does from the beginning.
        ("fedbabu", {"tune_epochs": 1}, 0),
    ],
)
def test_a_site_measures_the_version_and_its_own_model_if_there_is_one(
    coordinator: LiveCoordinator, tmp_path: Path, method: str, chosen: dict[str, Any], personal_from: int | None
) -> None:
    client = coordinator.client()
    run = begin(client, method, Evaluation(sites=True), **chosen)
    with working(settings(coordinator, tmp_path / "state")):
        found = measured(client, run)
    assert sorted(found) == [0, 1, 2]
    for number, one in found.items():
        own = PERSONAL if personal_from is not None and number >= personal_from else set()
        assert set(one.numbers) == GLOBAL | own, number
    # A quarter of the 179 or 180 images that are an eighth of the training part's 1437.
    assert {(one.worker, one.held_out, one.examples) for one in found.values()} == {("a/w", True, 45)}


def test_the_version_is_measured_without_what_the_site_keeps_and_its_own_model_with_it(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    run = begin(client, "fedper", Evaluation(sites=True))
    given = settings(coordinator, tmp_path / "state")
    with working(given):
        numbers = measured(client, run)[ROUNDS].numbers
    held_out = datasets_of(given)["digits"].held_out
    assert held_out is not None
    file = io.BytesIO()
    client.export(run.id, file)
    model = instantiate(VIT, "image-classification", seed=1)
    version = load(file.getvalue())
    kept = load((tmp_path / "state" / "vault" / run.id / "current.safetensors").read_bytes())
    # The head of the version was never trained.
    for prefix, tensors in (("", version), ("personal_", version | kept)):
        model.load_state_dict(tensors)
        again = evaluate(model, "image-classification", Batches(held_out, 64, CPU), lambda: None)
        assert {name: numbers[prefix + name] for name in GLOBAL} == pytest.approx(again)
    assert numbers["personal_loss"] != numbers["loss"]


@pytest.mark.parametrize("method", ["fedper", "ditto", "local", "fedbabu"])
def test_measuring_changes_no_bit_of_what_is_trained(
    coordinator: LiveCoordinator, tmp_path: Path, method: str
) -> None:
    client, made = coordinator.client(), []
    for place, evaluation in enumerate((None, Evaluation(sites=True))):
        state = tmp_path / str(place)
        run = begin(client, method, evaluation)
        with working(settings(coordinator, state)):
            until(lambda run=run: client.run(run.id).state == "completed")
            kept = state / "vault" / run.id / "current.safetensors"
            until(lambda kept=kept: list(kept.parent.iterdir()) == [kept])
        made.append((client.run(run.id).version.digest, kept.read_bytes()))
    assert made[0] == made[1]


def test_a_worker_that_holds_nothing_out_is_not_asked(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    run = begin(client, "fedavg", Evaluation(sites=True))
    with working(settings(coordinator, tmp_path / "state", held_out=None)):
        assert measured(client, run) == {}


def test_a_dual_encoder_is_measured_with_the_shared_prompts_and_with_the_site_s_own(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    data = pairs("clip")
    data = Dataset(data.tensors, data.common, held_out=pairs("clip", 6))
    worker = ScriptedWorker(
        coordinator.client("site", "a"),
        kinds=("train", "evaluate"),
        datasets={"data": 24},
        held_out={"data": 6},
        methods=("pfeddc",),
    )
    cache = Cache(tmp_path / "cache", 1 << 24)
    bench = Workbench(worker.client, {"data": data}, CPU, Vault(tmp_path / "vault"), cache, tmp_path)
    worker.enrol()
    model = instantiate(dual("clip"), "contrastive", seed=0, prompts=Prompts(vision=2, text=2))
    blocks = block_table(model)
    start = {block.name: read_block(named_tensors(model), block) for block in blocks}
    document = Model(config=dual("clip"), head="contrastive", blocks=blocks, prompts=Prompts(vision=2, text=2))
    client = coordinator.client()
    run = start_run(
        client,
        document,
        start,
        method=Chosen(name="pfeddc"),
        training=Training(optimizer="sgd", momentum=0, learning_rate=0.5, batch_size=8),
        evaluation=Evaluation(sites=True),
    )
    for _ in range(3):
        bench.do(worker.take(), lambda: None, Report())
    found = measured(client, run)
    assert {number: set(one.numbers) for number, one in found.items()} == {0: GLOBAL, 1: GLOBAL | PERSONAL}
    assert found[1].numbers["personal_loss"] != found[1].numbers["loss"]
