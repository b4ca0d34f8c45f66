"""Several labels, targets and entities from a site to the figures of a run, over HTTP, and with privacy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.shared.api.runs import Evaluation
from tessera.shared.metrics.classification import FigureTables, group_figures
from tessera.shared.metrics.comparison import best_version
from tessera.shared.metrics.rows import rows_of
from tessera.shared.metrics.site_spread import scores_by_version
from tessera.shared.model.dataset_schema import DatasetSchema
from tessera.shared.model.spec import Head, Model
from tessera.shared.terminal.metric_tables import figure_tables
from tessera.simulation import Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Subgroups
from tessera.worker.governance.departures import departures
from tessera.worker.governance.policy import Policy
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.state.audit import Audit
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.vault import Vault
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, start_run
from tests.support.runner import task_runner
from tests.support.tasks import untrained
from tests.worker.executor.test_equal_results import BERT, NUMBER, SEVERAL

CPU = torch.device("cpu")
TAGS = {"0": "O", "1": "B-drug", "2": "I-drug"}
WIDE = {"initializer_range": 0.9}
TASKS: dict[str, tuple[dict[str, Any], Head]] = {
    "several labels": (SEVERAL | WIDE, "text-classification"),
    "targets": (NUMBER | WIDE, "text-classification"),
    "entities": (BERT | WIDE | {"id2label": TAGS}, "token-classification"),
}


def texts(task: str, count: int, seed: int) -> Dataset:
    ids = torch.randint(1, 20, (count, 8), generator=torch.Generator().manual_seed(seed))
    if task == "several labels":
        labels, schema = (ids[:, :3] % 2).float(), DatasetSchema(classes=3, problem="multi_label")
    elif task == "targets":
        labels, schema = 50 + 2.0 * (ids[:, 0] - 9), DatasetSchema(problem="regression")
    else:
        labels, schema = ids % 3, DatasetSchema(classes=3)
    columns = {"sex": Subgroups.of(("f", "m"), ["fm"[row % 2] for row in range(count)])}
    return Dataset({"input_ids": ids, "labels": labels}, schema=schema, subgroups=columns)


@pytest.mark.parametrize("task", TASKS)
def test_counts_of_sites_give_the_scores_and_figures_of_all_their_examples(
    coordinator: LiveCoordinator, tmp_path: Path, task: str
) -> None:
    config, head = TASKS[task]
    document, start = untrained(config, head, seed=0)
    client, audit = coordinator.client(), Audit(tmp_path, "w")
    runners = []
    for number, site in enumerate(("a", "b")):
        data = replace(texts(task, 40, number), held_out=texts(task, (held := 90 + 60 * number), 9 + number))
        worker = ScriptedWorker(
            coordinator.client("site", site), kinds=("evaluate",), datasets={"notes": 40}, held_out={"notes": held}
        )
        runner = task_runner(
            worker.client, {"notes": data}, TrainingSetup(CPU), Vault(tmp_path / f"vault-{site}"),
            Cache(tmp_path / f"cache-{site}", 1 << 24), tmp_path, policy=Policy(send_class_counts=True), audit=audit,
        )  # fmt: skip
        worker.enrol()
        runners.append((worker, runner))
    evaluation = Evaluation(sites=True, subgroups="sex")
    run = start_run(client, document, start, dataset="notes", rounds=0, evaluation=evaluation)
    for worker, runner in runners:
        runner.run(worker.take(), lambda: None, Report())
    found = list(client.measurements(run.id, counts=True))
    assert sorted(one.examples for one in found) == [90, 150]
    scores = scores_by_version(found)[0]
    # Without counts, the same names are means of sites.
    silent = scores_by_version([one.model_copy(update={"class_counts": None}) for one in found])[0]
    pooled = {"several labels": "micro_f1", "targets": "r2", "entities": "entity_partial_f1"}[task]
    assert pooled in scores
    assert f"{pooled} (mean of sites)" in silent
    main = {"several labels": "micro_f1", "targets": "mae", "entities": "entity_f1"}[task]
    best = best_version(found)
    assert best
    assert (best.metric, best.value) == (main, pytest.approx(scores[main]))
    (whole, *parts) = group_figures(found)
    assert whole.found.labels == (240 * 8 if task == "entities" else 240)
    assert whole.found.figures[main].value == pytest.approx(scores[main], rel=1e-2)
    assert {(one.site, one.subgroup) for one in parts} >= {(None, "f"), (None, "m"), ("a", "f"), ("b", "m")}
    names = {one.metric for one in rows_of(run, [], [], found) if one.stage == "figures"}
    assert {main, f"sex/f/{main}"} <= names
    if task == "several labels":
        assert {"auroc.2", "f1.0", "macro_auroc", "recall.1.low"} <= names
        # Of each site by its own histograms, and of all by their sums.
        assert "macro_auroc (mean of sites)" in scores
    if task == "entities":
        assert {"entity_f1.1", "entity_partial_f1.1", "accuracy"} <= names
    tables = FigureTables.of([whole, *parts], "sex", ["one", "two", "three"])
    assert tables
    assert len(list(figure_tables(tables))) == {"several labels": 2, "targets": 1, "entities": 3}[task]
    left = departures(audit.read(), None, None)
    told = (
        "sums of targets and of errors, the same by subgroup" if task == "targets" else "counts by class, a confusion"
    )
    assert [told in each.figures for each in left] == [True, True]
    until(lambda: client.run(run.id).state == "completed")
    page = signed_in(coordinator).see(f"/runs/{run.id}")
    assert ("Confusion matrix" in page.text) == (task == "entities")
    assert ("By class" in page.text) == (task != "targets")


def weights(task: str) -> Weights:
    config, head = TASKS[task]
    model = instantiate(config, head, seed=1)
    blocks, tensors = block_table(model), named_tensors(model)
    described = Model(config=config, head=head, blocks=blocks)
    return Weights(described, {block.name: read_block(tensors, block) for block in blocks})


@pytest.mark.parametrize("task", TASKS)
def test_private_training_moves_the_model_and_its_rounded_figures_are_those_of_the_task(task: str) -> None:
    spec = {
        "method": {"name": "fedavg"}, "rounds": 1, "evaluation": {"sites": True},
        "training": {"batch_size": 8, "steps": 2, "optimizer": "sgd", "learning_rate": 0.1},
        "privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0},
    }  # fmt: skip
    data = replace(texts(task, 40, 1), held_out=texts(task, 60, 2))
    start = weights(task)
    found = simulate(spec, start, {"a": data})
    assert all(done.state == "merged" for made in found.rounds for done in made.tasks)
    after = found.arrays()
    assert any((after[name] != values).any() for name, values in start.values.items())
    metrics = found.measurements[-1].metrics
    assert {"several labels": "micro_f1", "targets": "mae", "entities": "entity_f1"}[task] in metrics


@pytest.mark.parametrize("task", TASKS)
def test_training_learns_the_task(task: str) -> None:
    spec = {
        "method": {"name": "fedavg"}, "rounds": 3, "evaluation": {"sites": True},
        "training": {"batch_size": 8, "epochs": 6, "optimizer": "adamw", "learning_rate": 3e-3},
    }  # fmt: skip
    data = replace(texts(task, 120, 1), held_out=texts(task, 60, 2))
    found = simulate(spec, weights(task), {"a": data})
    by_version = [one.metrics["loss"] for one in found.measurements]
    assert by_version[-1] < 0.8 * by_version[0]
