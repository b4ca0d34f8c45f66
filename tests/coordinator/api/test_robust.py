"""Robust runs over HTTP: hostile workers do not move them, and an administrator sees who differs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Round, Run
from tessera.shared.api.tasks import Submission, Task
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.rounds.outliers import ABSENT
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, head_of, small_model, start_run, values

MODEL = small_model()
START = values(MODEL)
HEAD = START["head.weight"]
MEDIAN = {"rule": "median"}
METHODS = ("fedavg", "fednova")
_names = itertools.count()

Taken = list[tuple[ScriptedWorker, Task]]


def begun(
    live: LiveCoordinator, sites: str, examples: tuple[int, ...] = (), **spec: object
) -> tuple[Client, Run, Taken]:
    client, name = live.client(), f"robust{next(_names)}"
    workers = [
        ScriptedWorker(live.client("site", site), name=name, datasets={name: count}, methods=METHODS).enrol()
        for site, count in zip(sites, examples or (10,) * len(sites), strict=True)
    ]
    cohort = Cohort(size=len(sites), quorum=3)
    run = start_run(client, MODEL, START, **{"dataset": name, "cohort": cohort, **spec})
    return client, run, [(worker, worker.take()) for worker in workers]


def committed(client: Client, run: Run) -> Round:
    until(lambda: client.run(run.id).state == "completed")
    return next(client.rounds(run.id))


def test_a_hostile_worker_does_not_move_a_robust_run_and_is_seen(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, "abcde", robust=MEDIAN)
    for (worker, task), step in zip(taken, (1.0, 2.0, 3.0, 4.0, -1e6), strict=True):
        worker.train(task, step)
    committed(client, run)
    # Of 1 2 3 4 and -10^6.
    np.testing.assert_allclose(head_of(client, run), HEAD + 2, rtol=1e-5, atol=1e-5)
    until(lambda: "anomaly.cosine" in client.round(run.id, 1).tasks[0].metrics)
    metrics = {task.worker[0]: task.metrics for task in client.round(run.id, 1).tasks}
    # All move the same elements by 1 2 3 4 and 10^6, so norms are as 1 2 3 4 10^6 and their median is 3.
    norms = [metrics[site]["anomaly.norm"] for site in "abcde"]
    np.testing.assert_allclose(norms, [1 / 3, 2 / 3, 1, 4 / 3, 1e6 / 3], rtol=1e-4)
    # From 2 they are 1 0 1 2 10^6 away, the median of which is 1.
    distances = [metrics[site]["anomaly.distance"] for site in "abcde"]
    np.testing.assert_allclose(distances, [1, 0, 1, 2, 1e6], rtol=1e-4, atol=1e-2)
    cosines = [metrics[site]["anomaly.cosine"] for site in "abcde"]
    np.testing.assert_allclose(cosines, [1, 1, 1, 1, -1], rtol=1e-4)


def test_distances_are_of_steps_as_fednova_scales_them(standing: LiveCoordinator) -> None:
    training = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 1}
    client, run, taken = begun(
        standing, "abc", (2, 4, 16), robust=MEDIAN, method=MethodSpec(name="fednova"), training=training
    )
    for (worker, task), step in zip(taken, (1.0, 4.0, 32.0), strict=True):
        worker.train(task, step, effective_steps=float(worker.datasets[task.dataset]))
    committed(client, run)
    # The median of 2, 4 and 16 steps makes steps of 2, 4 and 8 of these.
    np.testing.assert_allclose(head_of(client, run), HEAD + 4, rtol=1e-5, atol=1e-5)
    until(lambda: "anomaly.cosine" in client.round(run.id, 1).tasks[0].metrics)
    found = {task.worker[0]: task.metrics["anomaly.distance"] for task in client.round(run.id, 1).tasks}
    # They are 2, 0 and 4 away from 4, the median of which is 2.
    np.testing.assert_allclose([found[site] for site in "abc"], [1, 0, 2], rtol=1e-4, atol=1e-5)


def test_a_site_does_not_see_its_scores_and_cannot_say_what_they_are(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, "abc")
    lying, task = taken[0]
    digest = lying.upload(task, {"head.weight": HEAD + np.float32(100)})
    said = {"anomaly.norm": 1.0, "anomaly.cosine": 1.0, "mine": 2.0}
    lying.client.submit(
        task.id,
        Submission(token=task.token, version=task.version.digest, update=digest, examples=10, metrics=said),
    )
    for worker, other in taken[1:]:
        worker.train(other)
    shown = committed(client, run).tasks[0].metrics
    # A run without a rule has norms only, and leaves out what is far larger than the others.
    assert set(shown) == {"anomaly.left_out", "anomaly.norm", "mine", "update_norm"}
    assert shown["anomaly.norm"] > 10
    assert set(lying.client.task(task.id).metrics) == {"mine", "update_norm"}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), pytest.param((3, 2, 1, 0), marks=pytest.mark.long)])
def test_an_update_far_larger_than_the_round_s_median_is_left_out(
    standing: LiveCoordinator, order: tuple[int, ...]
) -> None:
    client, run, taken = begun(standing, "abcd", max_norm_of_median=3.0)
    # Whoever comes first, it is judged by all: the median of 1 2 3 100 is 2.5.
    steps = (100.0, 1.0, 2.0, 3.0)
    for place in order:
        worker, task = taken[place]
        worker.train(task, steps[place])
    made = committed(client, run)
    np.testing.assert_allclose(head_of(client, run), HEAD + 2, rtol=1e-6)
    assert [task.state for task in made.tasks] == ["left_out", "merged", "merged", "merged"]
    assert {task.worker[0] for task in made.tasks if task.metrics.get("anomaly.left_out")} == {"a"}
    (warning,) = list(client.versions(run.id))[-1].warnings
    left_out = f"the updates of {made.tasks[0].worker} were left out"
    assert warning == f"{left_out}: larger than 3.0 times the largest median norm"


def test_a_site_that_claims_few_steps_is_left_out_where_the_method_would_stretch_its_update(
    standing: LiveCoordinator,
) -> None:
    spec = {"method": MethodSpec(name="fednova"), "training": {"batch_size": 1}, "max_norm_of_median": 3.0}
    client, run, taken = begun(standing, "abcd", **spec)
    lying, task = taken[0]
    # It moves no further than the others, but 3 in one step beside 1 2 3 in ten.
    lying.submit(task, lying.upload(task, {"head.weight": HEAD + np.float32(3)}), examples=1, effective_steps=1.0)
    for (worker, other), step in zip(taken[1:], (1.0, 2.0, 3.0), strict=True):
        digest = worker.upload(other, {"head.weight": HEAD + np.float32(step)})
        worker.submit(other, digest, effective_steps=10.0)
    made = committed(client, run)
    assert [task.state for task in made.tasks] == ["left_out", "merged", "merged", "merged"]
    np.testing.assert_allclose(head_of(client, run), HEAD + 2, rtol=1e-6)
    # The median of 3 and 0.1 0.2 0.3 is 0.25.
    assert made.tasks[0].metrics["anomaly.norm"] == pytest.approx(12)
    bounds = client.run(run.id).bounds
    assert bounds is not None
    assert bounds.median_norm == pytest.approx(made.tasks[0].metrics["update_norm"] / 12)


def test_the_command_line_shows_the_scores(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, "abc", robust=MEDIAN, max_norm_of_median=5.0)
    for (worker, task), step in zip(taken, (1.0, 2.0, 50.0), strict=True):
        worker.train(task, step)
    committed(client, run)
    settings = {"TESSERA_URL": standing.url, "TESSERA_TOKEN": standing.token("admin"), "COLUMNS": "160"}
    shown = tessera("run", "show", run.id, "--scores", **settings).stdout
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith("1 ") and "/" in line]
    assert [row[-2:] for row in rows if "left" in row] == [["left", "out"]]
    assert "robust" in shown
    assert "median (attackers 1)" in shown


def test_the_command_line_says_why_there_is_no_score(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, "abc")
    for worker, task in taken:
        worker.train(task)
    committed(client, run)
    settings = {"TESSERA_URL": standing.url, "TESSERA_TOKEN": standing.token("admin"), "COLUMNS": "160"}
    shown = " ".join(tessera("run", "show", run.id, "--scores", **settings).stdout.split())
    assert shown.count("1.00 - -") == 3
    assert ABSENT in shown


def test_a_method_that_no_rule_guards_is_refused_when_the_run_is_created(standing: LiveCoordinator) -> None:
    client = standing.client()
    training = {"optimizer": "sgd", "learning_rate": 0.1}
    for name in ("scaffold", "feddyn"):
        with refusing("invalid", "does not say that robust guards all of it"):
            wanted = {"method": MethodSpec(name=name), "training": training, "cohort": Cohort(quorum=3)}
            start_run(client, MODEL, START, robust=MEDIAN, **wanted)
