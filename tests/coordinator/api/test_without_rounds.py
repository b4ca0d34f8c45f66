"""Runs without rounds over HTTP: a given model is measured at the sites, and nothing trains."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tessera.shared.api.runs import Cohort, Evaluation, Run, RunPatch
from tessera.shared.client.client import Client
from tessera.shared.client.run_file import check_spec
from tessera.shared.problems import Problem
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
