"""What the coordinator sees of a private task is the same whatever one of its examples is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from safetensors.torch import save_file

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Privacy, RunPatch, Training
from tessera.shared.api.tasks import Task, TaskView
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.spec import Head
from tessera.shared.run_settings import Unit
from tessera.shared.schema import EPSILON
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.stores import ledger_of
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.in_process import in_process
from tests.support.tasks import DIGITS_VIT as VIT
from tests.support.tasks import untrained

BERT = {
    "model_type": "bert", "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 8, "num_labels": 10,
}  # fmt: skip
Kind = Literal["images", "texts"]
PLACE = 5
ODD: dict[str, tuple[str, float]] = {
    "not a number": ("pixel_values", float("nan")),
    "infinite": ("pixel_values", float("inf")),
    "overflowing": ("pixel_values", 3e38),
    "of a class that the model lacks": ("labels", 99),
    "of a class below zero": ("labels", -7),
}
ODD_TEXTS: dict[str, tuple[str, float]] = {
    "of a word that the model lacks": ("input_ids", 30),
    "of a word below zero": ("input_ids", -1),
    "of a class that the model lacks": ("labels", 99),
}


FEW = ("not a number", "of a class that the model lacks")
"""One whose values and one whose class the model cannot use."""
OTHERS = tuple(what for what in ODD if what not in FEW)


def texts(odd: tuple[str, float] | None) -> dict[str, torch.Tensor]:
    """Sixteen texts in four groups, one of which is odd."""
    ids = torch.randint(2, 30, (16, 8), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "labels": torch.arange(16) % 10, "group": torch.arange(16) % 4}
    if odd:
        name, value = odd
        data[name][PLACE] = value
    return data


def images(odd: tuple[str, float] | None) -> dict[str, torch.Tensor]:
    """Sixteen images in four groups, one of which is odd."""
    drawn = torch.Generator().manual_seed(0)
    data = {
        "pixel_values": torch.randn(16, 1, 8, 8, generator=drawn),
        "labels": torch.arange(16) % 10,
        "group": torch.arange(16) % 4,
    }
    if odd:
        name, value = odd
        data[name][PLACE] = value
    return data


def worked(
    coordinator: LiveCoordinator, folder: Path, site: str, odd: tuple[str, float] | None, unit: Unit, kind: Kind
) -> tuple[TaskView, Any]:
    """A private task at a site with these images, or a noisy choice and training on these texts, and what its ledger
    has."""
    save_file(images(odd) if kind == "images" else texts(odd), folder / f"{site}.safetensors")
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", site), name="w", state_dir=folder / site, threads=1,
        poll_seconds=5, datasets={"scans": {"kind": "arrays", "file": str(folder / f"{site}.safetensors")}},
    )  # fmt: skip
    config, head = (VIT, "image-classification") if kind == "images" else (BERT, "text-classification")
    document, start = untrained(config, cast("Head", head), seed=1)
    agent, client = Agent(settings, Stop()), coordinator.client()
    run = start_run(
        client,
        document,
        start,
        dataset="scans",
        codec="raw",
        cohort=Cohort(sites=(site,)),
        # All examples are in each step, so that the odd one is.
        training=Training(steps=3, batch_size=None, optimizer="sgd", learning_rate=1e-3),
        method=MethodSpec(name="fedavg") if kind == "images" else MethodSpec(name="safl", settings={"layers": 1}),
        privacy=Privacy(
            clip_norm=1.0,
            epsilon=8.0,
            delta=1e-2,
            unit=unit,
            selection="refused" if kind == "images" else "noisy",
        ),
    )
    task: Task = until(agent._next)
    agent._run_task(task)
    agent.close()
    until(lambda: client.run(run.id).state == "completed")
    entries = ledger_of(settings).read("scans")
    return client.task(task.id), [(entry.unit, entry.examples, entry.events) for entry in entries]


def seen(task: TaskView, kind: Kind) -> dict[str, Any]:
    """All that the coordinator has of a task, but for its names, its times, the noisy update and its noisy choice."""
    assert task.progress is not None
    progress = task.progress.model_dump()
    shown = {"layers"} if kind == "images" else set[str]()
    return {
        **task.model_dump(include={"state", "problem", "examples", "upload_bytes", "attempts", "token", *shown}),
        "metrics": sorted(task.metrics),
        "epsilon": task.metrics[EPSILON],
        "progress": progress,
    }


@pytest.mark.parametrize(
    ("kind", "unit", "odd_ones"),
    [
        pytest.param("images", "example", tuple(ODD), id="images-example"),
        pytest.param("images", "group", FEW, id="images-group"),
        pytest.param("images", "group", OTHERS, marks=pytest.mark.long, id="others-group"),
        pytest.param("texts", "example", tuple(ODD_TEXTS), marks=pytest.mark.long, id="texts-example"),
    ],
)
def test_no_odd_example_changes_what_the_coordinator_sees(
    coordinator: LiveCoordinator, tmp_path: Path, kind: Kind, unit: Unit, odd_ones: tuple[str, ...]
) -> None:
    plain, spent = worked(coordinator, tmp_path, "plain", None, unit, kind)
    expected = seen(plain, kind)
    assert (expected["state"], expected["problem"], expected["progress"]["loss"]) == ("merged", None, None)
    for number, what in enumerate(odd_ones):
        odd = ODD[what] if kind == "images" else ODD_TEXTS[what]
        task, ledger = worked(coordinator, tmp_path, f"odd-{number}", odd, unit, kind)
        assert seen(task, kind) == expected, what
        assert ledger == spent, what
    ((_, _, events),) = spent
    assert len(events) == (1 if kind == "images" else 2)


def measured(
    coordinator: LiveCoordinator,
    folder: Path,
    site: str,
    odd: tuple[str, float] | None,
    kind: Kind,
    execute: Callable[[WorkerSettings], Any] = lambda _: None,
) -> TaskView:
    """An evaluation on these examples, at a site that requires privacy."""
    given = images(odd) if kind == "images" else texts(odd)
    save_file(given, folder / f"{site}.safetensors")
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", site), name="w", state_dir=folder / site, threads=1,
        poll_seconds=5,
        datasets={"scans": {"kind": "arrays", "file": str(folder / f"{site}.safetensors"), "use": "evaluate"}},
        policy={"require_privacy": {"epsilon": 8.0, "evaluations": True}, "min_evaluation_examples": 16},
    )  # fmt: skip
    config, head = (VIT, "image-classification") if kind == "images" else (BERT, "text-classification")
    document, start = untrained(config, cast("Head", head), seed=1)
    agent, client = Agent(settings, Stop(), executor=execute(settings)), coordinator.client()
    cohort = Cohort(sites=(site, "trains"))
    run = start_run(client, document, start, dataset="wards", cohort=cohort, evaluation=Evaluation(dataset="scans"))
    task: Task = until(agent._next)
    agent._run_task(task)
    agent.close()
    client.patch_run(run.id, RunPatch(state="cancelled"))
    return client.task(task.id)


@pytest.mark.parametrize(("kind", "odd_ones"), [("images", ODD), ("texts", ODD_TEXTS)])
def test_no_odd_example_fails_an_evaluation_or_moves_a_figure_by_more_than_a_step(
    coordinator: LiveCoordinator, tmp_path: Path, kind: Kind, odd_ones: dict[str, tuple[str, float]]
) -> None:
    plain = measured(coordinator, tmp_path, "plain", None, kind)
    # Of sixteen examples in ten classes, by steps of five examples and of five clipped losses.
    steps = {"accuracy": 5 / 16, "loss": 5 * 2 * math.log(10) / 16}
    assert (plain.state, set(plain.metrics)) == ("accepted", set(steps))
    for number, (what, odd) in enumerate(odd_ones.items()):
        task = measured(coordinator, tmp_path, f"odd-{number}", odd, kind)
        assert (task.state, task.problem, task.examples) == ("accepted", None, 16), what
        assert set(task.metrics) == set(steps), what
        for name, step in steps.items():
            assert abs(task.metrics[name] - plain.metrics[name]) <= step * (1 + 1e-9), (what, name)


def test_a_failed_evaluation_names_no_cause_where_figures_are_rounded(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Target 99 is out of bounds")

    # A library's error in the midst of an evaluation.
    monkeypatch.setattr("tessera.worker.privacy.bounded_figures.cross_entropy", fails)
    task = measured(coordinator, tmp_path, "north", None, "images", in_process)
    assert task.state == "failed"
    assert task.problem is not None
    assert task.problem.detail == "no-figures: this site has no figures of the version; its own log has more"
