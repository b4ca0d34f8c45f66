"""Several processes of a simulation: the bits of one process, however it was stopped, and processes that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    Selector,
    TaskContext,
    TrainingStats,
    WorkerHalf,
)
from tessera.shared.methods.registry import methods
from tessera.simulation import Conditions, Result, VirtualSite, Weights, simulate
from tessera.simulation.worker_processes import WorkerProcessFailed
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate
from tests.simulation.test_simulation import DROPOUT, images
from tests.support.variants import variants

SITES = {name: images(seed, 8 + 4 * seed, held_out=20) for seed, name in enumerate(("east", "north", "west"))}
MEASURED = {"evaluation": {"sites": True}}
# What sites keep, what the server keeps, codecs that drop, noise, and rounds that need only the first answers.
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"training": {"batch_size": 8, "learning_rate": 1e-3}, **MEASURED},
    "fedrep": {"method": {"name": "fedrep"}, **MEASURED},
    "scaffold": {"method": {"name": "scaffold"}},
    "topk": {"codec": "delta+topk=0.05+shuffle+zstd", "server_optimizer": {"kind": "adam"}},
    "first": {"cohort": {"target_updates": 1}},
    "sums": {"secure_sums": {"helpers": list(SITES), "quorum": 3}, "cohort": {"quorum": 3}, **MEASURED},
    "median": {"robust": {"rule": "median"}, "cohort": {"quorum": 3}, "codec": "raw"},
}
EACH_CASE = variants(CASES, {"first", "scaffold", "sums"})
"""What sites and the server keep, sums, and rounds that need only the first answers; in the long tests all."""


@pytest.fixture(scope="module")
def model() -> Weights:
    return Weights.of(instantiate(DROPOUT, "image-classification", seed=1), DROPOUT, "image-classification")


def run(case: str, model: Weights, processes: int, out: Path | None = None, until: int | None = None) -> Result:
    training = {"batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd"}
    spec = {"method": {"name": "fedavg"}, "rounds": 3, "training": training, **CASES[case]}
    conditions = Conditions(threads=1, processes=processes)
    return simulate(spec, model, SITES, conditions=conditions, out=out, until=until)


def facts(result: Result) -> dict[str, Any]:
    """All that a simulation computes and counts. Ids are drawn."""
    tasks = [task.model_dump(mode="json", exclude={"id", "run"}) for made in result.rounds for task in made.tasks]
    kept = {site: {name: values.tobytes() for name, values in result.kept(site).items()} for site in SITES}
    return {
        "versions": [(version.digest, version.scalars) for version in result.versions],
        "measurements": [one.model_dump(mode="json") for one in result.measurements],
        "tasks": tasks,
        "kept": kept,
    }


@pytest.mark.parametrize("case", EACH_CASE)
def test_several_processes_compute_the_bits_of_one_also_if_they_were_stopped(
    model: Weights, tmp_path: Path, case: str
) -> None:
    one = facts(run(case, model, processes=1))
    # What is kept of the first round comes to the second in other processes, and to the third in this one.
    run(case, model, processes=2, out=tmp_path, until=2)
    assert facts(run(case, model, processes=1, out=tmp_path)) == one


def killed_in_another(parent: int) -> Dataset:
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return images(0)


def test_a_killed_process_is_told_of_and_leaves_none_behind(model: Weights, tmp_path: Path) -> None:
    sites = {**SITES, "a": VirtualSite(partial(killed_in_another, os.getpid()))}
    spec = {"method": {"name": "fedavg"}, "rounds": 1}
    conditions = Conditions(threads=1, processes=2, loaded=1)
    with pytest.raises(WorkerProcessFailed, match="in task 1-1-0 with exit code -9; repeat the command to resume"):
        simulate(spec, model, sites, conditions=conditions, out=tmp_path)
    # The folder's lock is free, and another process count goes on.
    assert simulate(spec, model, sites, conditions=Conditions(threads=1), out=tmp_path).over


class Faulty(WorkerHalf[MethodSettings]):
    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        raise KeyError("a slip in the method's code")


@pytest.fixture
def _faulty_method() -> Iterator[None]:
    methods()["faulty"] = Method(
        "faulty", coordinator=CoordinatorHalf[MethodSettings], worker=Faulty, source="a test"
    )
    yield
    del methods()["faulty"]


@pytest.mark.usefixtures("_faulty_method")
def test_a_fault_in_a_methods_code_comes_with_the_traceback_of_its_process(model: Weights) -> None:
    with pytest.raises(WorkerProcessFailed, match=r"(?s)task 1-1-\d of \w+/worker failed.*in collect.*a slip"):
        simulate(
            {"method": {"name": "faulty"}, "rounds": 1}, model, SITES, conditions=Conditions(threads=1, processes=2)
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"processes": 2}, "threads is unset and device is cpu"),
        ({"processes": 2, "threads": 2}, "threads is 2 and device is cpu"),
        ({"processes": 3, "threads": 1, "device": "auto"}, "threads is 1 and device is auto"),
        ({"processes": 0}, "greater than 0"),
    ],
)
def test_several_processes_need_one_thread_each_and_the_cpu(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Conditions.model_validate(settings)
