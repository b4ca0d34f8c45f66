"""Rehearsals over HTTP: each worker gets the first round's task, and its answer is kept."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.api.runs import Evaluation, Privacy, Run, RunPatch
from tessera.shared.api.tasks import ReportResult, Task
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import Problem
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()
START = values(MODEL)
NONE = "\u2013"
"""An empty cell of a page."""


def worker(coordinator: LiveCoordinator, site: str, **about: Any) -> ScriptedWorker:
    given = {"kinds": ("train", "evaluate", "rehearse"), "held_out": {"data": 4}, **about}
    return ScriptedWorker(coordinator.client("site", site), **given).enrol()


def rehearse(coordinator: LiveCoordinator, **spec: Any) -> Run:
    return start_run(coordinator.client(), MODEL, START, rounds=0, **{"rehearsal": 7, **spec})


def answer(worker: ScriptedWorker, task: Task, **found: Any) -> None:
    report = Rehearsal(**{"examples": 10, "steps": 4, "train_seconds": 20.0, "update_bytes": 300, **found})
    result = ReportResult(token=task.token, rehearsal=report)
    # A repetition, as after a lost answer.
    assert worker.client.submit_report(task.id, result) == worker.client.submit_report(task.id, result)


def test_each_worker_rehearses_the_first_round_of_the_run(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    workers = [worker(coordinator, "a", name=name) for name in ("one", "two")] + [worker(coordinator, "b")]
    # Neither evaluations nor the size of a cohort decide who is asked.
    method = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 2, "scope": "v_head"})
    asked = {"method": method, "cohort": Cohort(size=1), "evaluation": Evaluation(sites=True, dataset="data")}
    run = rehearse(coordinator, **asked, codec="delta+int8")
    for one in workers:
        task = one.take()
        assert (task.kind, task.round, task.rounds, task.codec) == ("rehearse", 1, 7, "delta+int8")
        assert (task.plan.stage, task.version.number, task.held_out) == ("warm-up", 0, False)
        assert task.plan.upload.resolve(MODEL.blocks)
        answer(one, task)
    until(lambda: client.run(run.id).state == "completed")
    assert [(one.worker, one.state) for one in client.reports(run.id)] == [
        ("a/one", "accepted"), ("a/two", "accepted"), ("b/w", "accepted"),
    ]  # fmt: skip
    assert all(one.claim(0) is None for one in workers)
    assert [*client.rounds(run.id), *client.measurements(run.id)] == []


def test_a_failure_is_an_answer_until_a_person_resumes(coordinator: LiveCoordinator) -> None:
    client, one = coordinator.client(), worker(coordinator, "a")
    run = rehearse(coordinator)
    one.fail(one.take())
    until(lambda: client.run(run.id).state == "paused")
    assert client.run(run.id).reason == "0 of 1 sites answered (a/w: failed); the quorum is 1"
    client.patch_run(run.id, RunPatch(state="running"))
    answer(one, one.take())
    until(lambda: client.run(run.id).state == "completed")


def test_the_page_of_a_rehearsal_shows_its_table_and_forecast(coordinator: LiveCoordinator) -> None:
    client, one, other = coordinator.client(), worker(coordinator, "a"), worker(coordinator, "b")
    run = rehearse(coordinator)
    answer(one, one.take(), fetch_seconds=1.0, download_bytes=1000)
    other.fail(other.take())
    until(lambda: client.run(run.id).state == "completed")
    page = signed_in(coordinator).see(f"/runs/{run.id}")
    assert ["a/w", "cpu", "real", "4", "20 s", NONE, NONE, "1.0 kB/s", "300 bytes", NONE] in page.rows
    assert ["b/w", "cpu", "failed", *[NONE] * 7] in page.rows
    # 7 rounds of 20.3 seconds.
    assert page.facts["Time"] == "2 min for 7 rounds; a/w decides"
    assert "b/w: failed: " in page.text


def test_the_preview_of_a_rehearsal_is_that_of_its_run(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker(coordinator, "a")
    worker(coordinator, "b", kinds=("train",))
    worker(coordinator, "c", kinds=("rehearse",))
    run = rehearse(coordinator, privacy=Privacy(epsilon=1.0, delta=1e-5, clip_norm=1.0))
    shown = client.preview_run(run.spec)
    said = {one.worker: [reason.detail for reason in one.ineligibilities] for one in shown.workers}
    assert said == {"a/w": [], "b/w": ["it does not rehearse"], "c/w": ["it does not train"]}
    assert [one.workload is not None for one in shown.workers] == [True, False, False]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"rounds": 3}, "the run only rehearses"),
        ({"describe": True}, "describe"),
        ({"method": MethodSpec(name="fedprox", settings={"mu": -1})}, "mu"),
        ({"training": {"label_smoothing": 0.1, "optimizer": "adamw", "momentum": 0.9}}, "has no effect"),
    ],
)
def test_a_rehearsal_refuses_what_its_run_would(
    coordinator: LiveCoordinator, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises((ValidationError, Problem)) as refusal:
        start_run(coordinator.client(), MODEL, START, **{"rounds": 0, "rehearsal": 7, **spec})
    faults = refusal.value.errors if isinstance(refusal.value, Problem) else [refusal.value]
    assert said in str(faults)
