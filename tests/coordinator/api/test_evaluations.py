"""Evaluation on a central data set and at sites, over HTTP, with workers that follow a script."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tessera.coordinator.conductor.liveness import Liveness
from tessera.coordinator.dashboard.queries import moved_by_run, round_sums
from tessera.coordinator.db.tables import SiteRow, TaskRow, WorkerRow
from tessera.coordinator.domain.eligibility import RunTerms
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Coverage, Evaluation, Run
from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client
from tessera.shared.client.round_outcomes import outcomes
from tessera.shared.methods.base import MethodSpec
from tessera.shared.metrics.comparison import History, compare
from tessera.shared.metrics.rows import rows_of
from tests.support.coordinator import WAIT_SECONDS, Clock, LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.telling import STILL, TOO_MANY, telling

MODEL = small_model()
START = values(MODEL)
BOTH: tuple[Any, ...] = ("train", "evaluate")


def site(coordinator: LiveCoordinator, name: str, held_out: int = 4, examples: int = 10) -> ScriptedWorker:
    """A worker that trains and holds something out."""
    held = {"data": held_out} if held_out else {}
    client = coordinator.client("site", name)
    return ScriptedWorker(client, kinds=BOTH, datasets={"data": examples}, held_out=held)


def judge(coordinator: LiveCoordinator, name: str) -> ScriptedWorker:
    """A worker with the central data set."""
    return ScriptedWorker(coordinator.client("site", name), kinds=("evaluate",), datasets={"test": 5})


def at_sites(client: Client, **spec: Any) -> Run:
    return start_run(client, MODEL, START, evaluation=Evaluation(sites=True), **spec)


def about(task: Task) -> tuple[str, bool, int]:
    return task.kind, task.held_out, task.version.number


def over(client: Client, run: Run) -> bool:
    return client.run(run.id).state == "completed"


def test_each_site_measures_each_version_before_it_trains_on(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b = site(coordinator, "a", 4), site(coordinator, "b", 6)
    for worker in (a, b):
        worker.enrol()
    run = at_sites(client, rounds=2, cohort=Cohort(size=2, quorum=2))
    for number in range(2):
        for worker in (a, b):
            first = worker.take()
            assert about(first) == ("evaluate", True, number)
            worker.evaluate(first, 1000, accuracy=number / 10, personal_accuracy=0.9)
        tasks = [worker.take() for worker in (a, b)]
        assert [about(task) for task in tasks] == [("train", False, number)] * 2
        a.train(tasks[0])
        b.train(tasks[1])
    for worker in (a, b):
        worker.evaluate(worker.take(), 100, accuracy=0.2)
    until(lambda: over(client, run))
    measured = [
        (m.version, m.site, m.dataset, m.held_out, m.examples, m.metrics["accuracy"])
        for m in client.measurements(run.id)
    ]
    assert sorted(measured) == [
        (number, name, "data", True, examples, number / 10)
        for number in range(3)
        for name, examples in (("a", 4), ("b", 6))
    ]
    # A round counts what the version that it trains from cost to evaluate, the last round the last version too.
    measurements, rounds = list(client.measurements(run.id)), list(client.rounds(run.id))
    assert [one.download_bytes for one in outcomes(rounds, run.spec, measurements)] == [2000, 2200]
    exported = rows_of(run, rounds, [], measurements)
    fetched = [(row.worker is None, row.value) for row in exported if row.metric == "download_bytes"]
    assert sum(value for total, value in fetched if total) == sum(value for total, value in fetched if not total)
    assert compare([History.of(run, rounds, measurements)]).runs[0].bytes[2] - 4200 == sum(
        task.upload_bytes for round_ in rounds for task in round_.tasks
    )
    with coordinator.services.database.snapshot() as session:
        moved = moved_by_run(session, run.id)[run.id]
        assert [(one.down, one.moved.evaluated) for one in round_sums(session, run, 9)] == [
            (2200, 2200),
            (2000, 2000),
        ]
    # Whole models: one up for each of four updates, and down for six evaluations; nothing more was left to fetch.
    assert (moved.down, moved.evaluated, moved.full) == (4200, 4200, 10 * run.model_bytes)


def test_a_worker_may_be_a_site_and_the_central_evaluator(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = site(coordinator, "a")
    worker.datasets["test"] = 9
    worker.enrol()
    run = start_run(client, MODEL, START, evaluation=Evaluation(dataset="test", sites=True))
    found = set()
    while not over(client, run):
        if task := worker.claim(1):
            found.add((*about(task), task.dataset))
            worker.train(task) if task.kind == "train" else worker.evaluate(task, accuracy=0.5)
    expected = {("evaluate", held_out, number) for held_out in (True, False) for number in (0, 1)}
    assert {name[:3] for name in found} == expected | {("train", False, 0)}
    assert {(m.held_out, m.dataset, m.examples) for m in client.measurements(run.id)} == {
        (True, "data", 4),
        (False, "test", 9),
    }


def test_only_sites_that_train_for_the_run_and_hold_something_out_are_asked(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    asked = site(coordinator, "asked")
    holds_nothing = site(coordinator, "holds-nothing", held_out=0)
    trains_only = ScriptedWorker(coordinator.client("site", "trains-only"), held_out={"data": 4})
    uninvited = site(coordinator, "uninvited")
    for worker in (asked, holds_nothing, trains_only, uninvited):
        worker.enrol()
    at_sites(client, cohort=Cohort(quorum=3, sites=("asked", "holds-nothing", "trains-only")))
    assert about(asked.take()) == ("evaluate", True, 0)
    assert [worker.take().kind for worker in (holds_nothing, trains_only)] == ["train", "train"]
    assert uninvited.claim(0) is None


def test_no_more_may_be_counted_than_is_held_out(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = site(coordinator, "a", held_out=4)
    worker.enrol()
    at_sites(client)
    task = worker.take()
    worker.held_out["data"] = 5
    with refusing("invalid", "more examples than the worker declared"):
        worker.evaluate(task, accuracy=1.0)


def test_an_evaluation_has_at_most_64_metrics(coordinator: LiveCoordinator) -> None:
    client, a = coordinator.client(), site(coordinator, "a")
    a.enrol()
    run = at_sites(client, cohort=Cohort(size=1))
    task = a.take()
    names = {f"invented_{number}": 1.0 for number in range(64)}
    report = {"token": task.token, "version": task.version.digest, "examples": 4, "metrics": {**names, "loss": 1.0}}
    answer = coordinator.http("site", "a").post(f"/v1/tasks/{task.id}/evaluation", json=report)
    (fault,) = refused(answer, 422, "invalid").errors
    assert (fault.pointer, fault.detail) == ("/metrics", "must have 64 or fewer entries")
    assert a.evaluate(task, **names).state == "accepted"
    assert [one.metrics for one in client.measurements(run.id)] == [names]


def test_a_site_that_was_away_is_asked_about_the_latest_version_only(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    here, late = site(coordinator, "here"), site(coordinator, "late")
    here.enrol()
    run = at_sites(client, rounds=5, cohort=Cohort(sites=("here", "late")))
    for _ in range(2):
        here.evaluate(here.take(), accuracy=0.5)
        here.train(here.take())
    until(lambda: client.run(run.id).version.number == 2)
    task = late.take()
    assert about(task) == ("evaluate", True, 2)


def test_a_site_that_joins_while_a_round_opens_measures_the_version_first(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = coordinator.client()
    here, late = site(coordinator, "here"), site(coordinator, "late")
    willing, joined = Liveness.willing, threading.Event()

    def joining(self: Liveness, run_id: str, invited: RunTerms) -> list[LiveWorker]:
        if not joined.is_set():
            joined.set()
            late.enrol()
        return willing(self, run_id, invited)

    monkeypatch.setattr(Liveness, "willing", joining)
    here.enrol()
    at_sites(client, rounds=5, cohort=Cohort(sites=("here", "late")))
    here.evaluate(here.take(), accuracy=0.5)
    assert joined.wait(WAIT_SECONDS)
    late.evaluate(late.take(), accuracy=0.5)
    late.train(late.take())
    mine = (
        select(TaskRow.kind).join(WorkerRow).join(SiteRow).where(SiteRow.name == "late").order_by(TaskRow.created_at)
    )
    with coordinator.services.database.snapshot() as session:
        assert session.scalars(mine).all()[:2] == ["evaluate", "train"]


def test_what_a_site_did_not_begin_gives_way_to_the_next_version(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    quick, slow = site(coordinator, "quick"), site(coordinator, "slow")
    slow.enrol()
    quick.enrol()
    run = at_sites(client, rounds=2, cohort=Cohort(size=2, quorum=1, target_updates=1))
    for _ in range(2):
        quick.evaluate(quick.take(), accuracy=0.5)
        quick.train(quick.take())
    quick.evaluate(quick.take(), accuracy=0.5)
    last = slow.take()
    assert about(last) == ("evaluate", True, 2)
    slow.evaluate(last, accuracy=0.5)
    until(lambda: over(client, run))
    assert sorted((m.version, m.site) for m in client.measurements(run.id)) == [
        (0, "quick"),
        (1, "quick"),
        (2, "quick"),
        (2, "slow"),
    ]


def test_a_site_that_fails_is_asked_again_up_to_its_tries_and_holds_nothing_up(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = site(coordinator, "a")
    worker.enrol()
    run = at_sites(client, cohort=Cohort(quorum=2, max_task_attempts=2))
    for _ in range(2):
        task = worker.take()
        assert about(task) == ("evaluate", True, 0)
        worker.fail(task)
    assert worker.claim(1) is None
    other = site(coordinator, "b", held_out=0)
    other.train(other.take())
    worker.train(worker.take())
    worker.evaluate(worker.take(), accuracy=0.25)
    until(lambda: over(client, run))
    assert [m.version for m in client.measurements(run.id)] == [1]


def test_a_failed_evaluation_is_offered_to_another_central_worker_and_then_again(
    coordinator: LiveCoordinator,
) -> None:
    client = coordinator.client()
    judges = [judge(coordinator, name) for name in "ab"]
    for worker in judges:
        worker.enrol()
    run = start_run(client, MODEL, START, evaluation=Evaluation(dataset="test"))
    first, second = judges
    first.fail(first.take())
    second.fail(second.take())
    task = first.take()
    assert client.task(task.id).attempts == 3
    first.evaluate(task, accuracy=0.75)
    assert [(m.version, m.worker) for m in client.measurements(run.id)] == [(0, "a/w")]


def test_a_version_that_nobody_can_evaluate_is_given_up(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = judge(coordinator, "a")
    worker.enrol()
    run = start_run(client, MODEL, START, evaluation=Evaluation(dataset="test"), cohort=Cohort(max_task_attempts=2))
    for _ in range(2):
        worker.fail(worker.take())
    assert worker.claim(1) is None
    trains = ScriptedWorker(coordinator.client("site", "b"))
    trains.train(trains.take())
    worker.evaluate(worker.take(), accuracy=0.5)
    until(lambda: over(client, run))


# ---------------------------------------------------------------- with a clock


@pytest.fixture
def live(tmp_path: Path, clock: Clock) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path, clock=clock, lease_seconds=60, liveness_seconds=90) as running:
        yield running


def test_what_a_central_worker_left_undone_goes_to_another(live: LiveCoordinator) -> None:
    client = live.client()
    gone, here = judge(live, "a"), judge(live, "b")
    for worker in (gone, here):
        worker.enrol()
    run = start_run(client, MODEL, START, evaluation=Evaluation(dataset="test"))
    held = gone.take()
    live.elapse(91, here)
    here.evaluate(here.take(), accuracy=0.5)
    assert client.task(held.id).state == "cancelled"
    assert [m.worker for m in client.measurements(run.id)] == ["b/w"]


def test_a_site_that_let_a_version_lapse_is_asked_about_the_latest_instead(
    live: LiveCoordinator, clock: Clock
) -> None:
    client = live.client()
    quick, slow = site(live, "quick"), site(live, "slow")
    for worker in (slow, quick):
        worker.enrol()
    run = at_sites(client, rounds=3, cohort=Cohort(size=2, quorum=1, target_updates=1))
    begun = slow.take()
    assert about(begun) == ("evaluate", True, 0)
    quick.evaluate(quick.take(), accuracy=0.5)
    quick.train(quick.take())
    until(lambda: client.run(run.id).version.number == 1)
    # A lease lasts 60 seconds here, and a worker is live for 90.
    clock.advance(61)
    until(lambda: client.task(begun.id).state != "leased")
    assert about(slow.take()) == ("evaluate", True, 1)
    # By its lease, or by the offer of the later version if that comes first.
    assert client.task(begun.id).state in ("expired", "cancelled")


def test_a_finished_run_does_not_wait_for_a_site_that_is_gone(live: LiveCoordinator) -> None:
    client = live.client()
    here, gone = site(live, "here"), site(live, "gone")
    for worker in (here, gone):
        worker.enrol()
    # Whoever was live before the coordinator began would be given the time to be heard of again.
    live.elapse(91, here, gone)
    run = at_sites(client, cohort=Cohort(size=2, quorum=1, target_updates=1))
    here.evaluate(here.take(), accuracy=0.5)
    here.train(here.take())
    here.evaluate(here.take(), accuracy=0.5)
    until(lambda: client.run(run.id).version.number == 1)
    assert client.run(run.id).state == "running"
    live.elapse(91, here)
    until(lambda: over(client, run))


# ---------------------------------------------------------------- what versions tell


def of_method(scalars: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if not name.startswith(Coverage.PREFIX)}


def test_a_version_tells_its_method_s_numbers_and_warnings(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    with telling() as method:
        run = start_run(client, MODEL, START, method=MethodSpec(name=method), rounds=3)
        worker = ScriptedWorker(coordinator.client("site", "a"), methods=(method,))
        for _ in range(3):
            worker.train(worker.take())
        until(lambda: over(client, run))
    told = [(v.number, of_method(v.scalars), v.warnings) for v in client.versions(run.id)]
    assert told == [
        (0, {}, ()),
        (1, {"moved": 1.0}, ()),
        (2, {"moved": 2.0}, (STILL,)),
        (3, {"moved": 3.0}, (STILL, TOO_MANY)),
    ]
    assert [version.number for version in client.versions(run.id, since=2)] == [2, 3]
    # What goes on is entered once.
    warned = [entry for entry in client.audit() if entry.action == "version.warning"]
    assert [(entry.run, entry.detail) for entry in warned] == [
        (run.id, {"number": 2, "warnings": [STILL]}),
        (run.id, {"number": 3, "warnings": [TOO_MANY]}),
    ]
