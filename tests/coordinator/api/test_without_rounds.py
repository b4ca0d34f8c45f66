"""Runs without rounds over HTTP: a given model is measured at the sites, and nothing trains."""

from __future__ import annotations

import csv
import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.session import Session
from tessera.shared.api.class_counts import BINS, SCORE_BINS, ClassCounts, ScoreCounts, sum_of
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunPatch
from tessera.shared.api.tasks import EvaluationResult
from tessera.shared.client.client import Client
from tessera.shared.client.run_file import check_spec
from tessera.shared.problems import Problem
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()
START = values(MODEL)


def site(coordinator: LiveCoordinator, name: str, **about: Any) -> ScriptedWorker:
    given = {"kinds": ("evaluate",), "held_out": {"data": 4}, **about}
    worker = ScriptedWorker(coordinator.client("site", name), **given)
    worker.enrol()
    return worker


def measure(client: Client, **spec: Any) -> Run:
    return start_run(client, MODEL, START, rounds=0, **{"evaluation": Evaluation(sites=True), **spec})


def ended(client: Client, run: Run) -> Run:
    until(lambda: client.run(run.id).state != "running")
    return client.run(run.id)


def test_each_site_measures_the_model_and_nothing_trains(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    workers = [site(coordinator, name) for name in "ab"]
    both = site(coordinator, "c", kinds=("train", "evaluate"))
    run = measure(client, cohort=Cohort(quorum=3))
    for worker in (*workers, both):
        task = worker.take()
        assert (task.kind, task.rounds, task.version.number) == ("evaluate", 0, 0)
        worker.evaluate(task, accuracy=0.5)
    found = ended(client, run)
    assert (found.state, found.reason, found.version.number) == ("completed", None, 0)
    assert sorted(one.site for one in client.measurements(run.id)) == ["a", "b", "c"]
    assert list(client.rounds(run.id)) == []
    assert both.claim(0) is None


def test_a_run_of_which_no_site_answered_is_not_complete(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = site(coordinator, "a")
    run = measure(client, cohort=Cohort(max_task_attempts=1))
    worker.fail(worker.take())
    found = ended(client, run)
    said = "0 of 1 sites answered (a/w: failed); the quorum is 1"
    assert (found.state, found.reason) == ("paused", said)
    environment = {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("admin")}
    watched = tessera("run", "watch", run.id, **environment)
    assert (watched.returncode, said in watched.stdout) == (3, True)
    # A person has mended the site.
    client.patch_run(run.id, RunPatch(state="running"))
    worker.evaluate(worker.take(), accuracy=0.5)
    assert ended(client, run).state == "completed"


def test_a_run_that_too_few_sites_answered_says_so_at_its_deadline(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = measure(client, cohort=Cohort(quorum=2, deadline_seconds=1))
    site(coordinator, "a").claim(0)
    found = ended(client, run)
    assert (found.state, "the quorum is 2" in (found.reason or "")) == ("paused", True)


def of_two_classes(matrix: tuple[tuple[int, int], tuple[int, int]]) -> ScoreCounts:
    """Counts of a classifier that gives each class that it predicts a probability near one."""
    (a, b), (c, d) = matrix
    inner = [0] * (SCORE_BINS - 2)
    positives, negatives = ([b, *inner, a], [c, *inner, d]), ([d, *inner, c], [a, *inner, b])
    return ScoreCounts(confusion=matrix, positives=positives, negatives=negatives)


def test_figures_by_class_and_subgroup_are_shown_and_exported_everywhere(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = measure(client, evaluation=Evaluation(sites=True, subgroups="sex"), cohort=Cohort(quorum=2))
    sent = {
        "a": {"f": of_two_classes(((30, 10), (5, 15))), "m": of_two_classes(((40, 0), (0, 10)))},
        "b": {"other": of_two_classes(((20, 0), (10, 10)))},
    }
    for name, counts in sent.items():
        labels = sum(sum(each.labels) for each in counts.values())
        worker = site(coordinator, name, held_out={"data": labels})
        task = worker.take()
        assert task.subgroups == "sex"
        found = EvaluationResult(
            token=task.token, version=task.version.digest, examples=labels, metrics={"accuracy": 0.8},
            class_counts=summed(counts), subgroup_counts=counts,
        )  # fmt: skip
        worker.client.submit_evaluation(task.id, found)
    ended(client, run)
    # All: 90 of 100 and 35 of 50 labels are right.
    page = signed_in(coordinator).see(f"/runs/{run.id}")
    assert [row for row in page.rows if row[:3] in (["0", "90", "10"], ["1", "15", "35"])] == [
        ["0", "90", "10"],
        ["1", "15", "35"],
    ]
    parts = {row[0]: row[1:3] for row in page.rows if row[0] in ("all", "sex f", "b, sex other")}
    assert parts["all"] == ["150", "0.833 (0.766 to 0.884)"]
    assert set(parts) == {"all", "sex f", "b, sex other"}
    environment = {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("admin")}
    watched = tessera("run", "watch", run.id, **environment)
    assert (watched.returncode, "is completed" in watched.stdout) == (0, True)
    shown = tessera("run", "show", run.id, **environment).stdout
    assert "0.833 (0.766 to 0.884)" in shown
    assert re.search(r"true class, predicted +0 +1", shown)
    told = json.loads(tessera("run", "show", run.id, "--json", **environment).stdout)["figures"]
    assert told[0]["found"]["figures"]["accuracy"]["value"] == 125 / 150
    rows = csv.DictReader(tessera("run", "metrics", run.id, **environment).stdout.splitlines())
    recall = [row for row in rows if row["metric"] == "sex/f/recall.1" and not row["site"]]
    assert [(row["stage"], row["value"]) for row in recall] == [("figures", "0.75")]
    table = Session(client).run(run.id).figures().query("figure == 'recall' and subgroup == 'all'")
    assert table.set_index(["site", "class"]).value["a", 1.0] == 25 / 30
    # Counts of more labels than were scored are refused.
    with pytest.raises(ValidationError, match="more labels than the 9 that were scored"):
        EvaluationResult(token=1, version=run.spec.version, examples=9, metrics={}, subgroup_counts=sent["a"])


def summed(counts: dict[str, ScoreCounts]) -> ClassCounts:
    matrix = sum_of([*counts.values()]).confusion
    labels, predictions = [*map(sum, matrix)], [*map(sum, zip(*matrix, strict=True))]
    hits, rest = [matrix[k][k] for k in range(2)], [0] * (BINS - 1)
    bins = {"bin_predictions": [*rest, sum(labels)], "bin_hits": [*rest, sum(hits)]}
    return ClassCounts.model_validate(
        {"labels": labels, "predictions": predictions, "hits": hits, **bins, "bin_confidence": [*rest, sum(labels)]}
    )


def test_a_central_evaluator_alone_answers(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    judge = site(coordinator, "judge", datasets={"test": 5}, held_out={})
    run = measure(client, evaluation=Evaluation(dataset="test"))
    task = judge.take()
    assert (task.held_out, task.dataset) == (False, "test")
    judge.evaluate(task, accuracy=0.5)
    assert ended(client, run).state == "completed"


def test_the_preview_counts_the_sites_that_would_measure(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    site(coordinator, "a")
    site(coordinator, "b", held_out={})
    site(coordinator, "c", kinds=("train",))
    run = measure(client)
    shown = client.preview_run(run.spec)
    assert (shown.eligible, shown.quorum) == (1, 1)
    said = {one.worker: [reason.rule for reason in one.ineligibilities] for one in shown.workers}
    assert said == {"a/w": [], "b/w": ["datasets"], "c/w": ["kinds"]}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"evaluation": None}, "asks the sites for nothing"),
        ({"cohort": Cohort(size=2)}, "each site is asked"),
        ({"codec": "raw"}, "has no effect here"),
    ],
)
def test_a_run_without_rounds_refuses_what_only_training_needs(
    coordinator: LiveCoordinator, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises((ValidationError, Problem)) as refusal:
        measure(coordinator.client(), **spec)
    faults = refusal.value.errors if isinstance(refusal.value, Problem) else [refusal.value]
    assert said in str(faults)


def test_the_rounds_of_a_run_without_any_stay(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = measure(client)
    with pytest.raises(Problem) as refusal:
        client.patch_run(run.id, RunPatch(rounds=2))
    assert "trains nothing" in str(refusal.value.errors)


def test_a_run_without_rounds_needs_no_method() -> None:
    check_spec("run.toml", {"name": "n", "dataset": "data", "rounds": 0, "evaluation": {"sites": True}})
