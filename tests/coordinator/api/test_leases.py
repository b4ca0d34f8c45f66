"""Leases, fencing and deadlines, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run
from tessera.shared.api.tasks import Failure, Task
from tessera.shared.client.client import Client
from tessera.shared.terminal.failures import task_failures
from tests.support.coordinator import Clock, LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, head_of, small_model, start_run, values

pytestmark = pytest.mark.both_databases(long="postgresql")

MODEL = small_model()
START = values(MODEL)


@pytest.fixture
def live(tmp_path: Path, clock: Clock) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path, clock=clock, lease_seconds=60) as coordinator:
        yield coordinator


def begun(live: LiveCoordinator, *sites: str, **spec: object) -> tuple[Client, Run, list[ScriptedWorker], list[Task]]:
    """A run whose first round has been claimed by a worker of each site."""
    client = live.client()
    workers = [ScriptedWorker(live.client("site", site)).enrol() for site in sites]
    run = start_run(client, MODEL, START, **spec)
    return client, run, workers, [worker.take() for worker in workers]


REPORTS: dict[str, Callable[[ScriptedWorker, Task], object]] = {
    "heartbeat": lambda worker, task: worker.client.heartbeat(task.id, task.token),
    "update": lambda worker, task: worker.train(task),
    "failure": lambda worker, task: worker.client.fail(task.id, Failure(token=task.token, code="x", detail="y")),
    "release": lambda worker, task: worker.client.release(task.id, task.token),
}
EVERY_REPORT = pytest.mark.parametrize("report", REPORTS)


@pytest.mark.both_databases
def test_a_lease_that_runs_out_is_offered_again_under_a_higher_token(live: LiveCoordinator, clock: Clock) -> None:
    client, _, (worker,), (task,) = begun(live, "a")
    clock.advance(60)
    until(lambda: client.task(task.id).state == "offered")
    again = ScriptedWorker(worker.client).take()
    assert (again.id, again.token, again.seed) == (task.id, task.token + 1, task.seed)
    assert client.task(task.id).attempts == 2


@EVERY_REPORT
def test_whoever_lost_a_lease_can_report_nothing_more(live: LiveCoordinator, clock: Clock, report: str) -> None:
    client, _, (old,), (task,) = begun(live, "a")
    clock.advance(60)
    new = ScriptedWorker(old.client)
    until(lambda: client.task(task.id).state == "offered")
    new_task = new.take()
    before = client.task(task.id)
    with refusing("lease-lost", f"token {new_task.token}; the request shows token {task.token}"):
        REPORTS[report](old, task)
    assert client.task(task.id) == before
    assert new.train(new_task).state == "accepted"


def test_whoever_lost_a_lease_is_not_answered_for_the_update_that_was_accepted(
    live: LiveCoordinator, clock: Clock
) -> None:
    client, _, (old, _), (task, _) = begun(live, "a", "b")
    clock.advance(60)
    new = ScriptedWorker(old.client)
    until(lambda: client.task(task.id).state == "offered")
    assert new.train(new.take()).state == "accepted"
    with refusing("lease-lost", f"the request shows token {task.token}"):
        old.train(task)


# A release of what expired in the meantime asks for what is already so.
@pytest.mark.parametrize("report", ["heartbeat", "update", "failure"])
def test_a_lapsed_lease_is_lost_even_before_another_takes_it(
    live: LiveCoordinator, clock: Clock, report: str
) -> None:
    client, _, (worker,), (task,) = begun(live, "a")
    clock.advance(60)
    until(lambda: client.task(task.id).state == "offered")
    with refusing("lease-lost", "the task is offered, not leased"):
        REPORTS[report](worker, task)


@pytest.mark.both_databases
@pytest.mark.parametrize("report", ["failure", "release"])
def test_a_repeated_report_gets_the_first_answer_and_changes_nothing(live: LiveCoordinator, report: str) -> None:
    client, _, (worker,), (task,) = begun(live, "a")
    first = REPORTS[report](worker, task)
    entries = [entry.seq for entry in client.audit() if entry.subject == task.id]
    assert REPORTS[report](worker, task) == first
    assert [entry.seq for entry in client.audit() if entry.subject == task.id] == entries


@pytest.mark.both_databases
def test_a_repeated_submission_of_a_rejected_update_is_refused_for_the_same_reason(live: LiveCoordinator) -> None:
    _, _, (worker,), (task,) = begun(live, "a")
    digest = worker.upload(task, {"head.weight": np.full_like(START["head.weight"], np.nan)})
    with refusing("invalid-update") as first:
        worker.submit(task, digest)
    with refusing("invalid-update") as again:
        worker.submit(task, digest)
    assert again.value.document() == first.value.document()


def test_heartbeats_keep_a_lease_for_as_long_as_they_come(live: LiveCoordinator, clock: Clock) -> None:
    client, run, (worker,), (task,) = begun(live, "a", cohort=Cohort(deadline_seconds=3600))
    for _ in range(10):
        clock.advance(50)
        assert worker.client.heartbeat(task.id, task.token).lease_seconds == 60
    worker.train(task)
    until(lambda: client.run(run.id).state == "completed")
    assert client.task(task.id).attempts == 1


@pytest.mark.both_databases
def test_a_round_counts_the_update_of_a_task_that_was_held_twice_only_once(
    live: LiveCoordinator, clock: Clock
) -> None:
    cohort = Cohort(size=2, quorum=2)
    client, run, (slow, steady), (slow_task, steady_task) = begun(live, "a", "b", cohort=cohort)
    digest = slow.upload(slow_task, {"head.weight": START["head.weight"] + np.float32(100)})
    clock.advance(40)
    steady.client.heartbeat(steady_task.id, steady_task.token)
    clock.advance(20)
    until(lambda: client.task(slow_task.id).state == "offered")
    restarted = ScriptedWorker(slow.client)
    restarted.train(restarted.take(), step=1.0)
    with refusing("lease-lost"):
        slow.submit(slow_task, digest)
    steady.train(steady_task, step=3.0)
    until(lambda: client.run(run.id).state == "completed")
    # (10 * 1 + 10 * 3) / 20 = 2, and the 100 of the lost lease is nowhere.
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 2, rtol=1e-6)


def test_a_task_has_so_many_tries_and_then_the_round_goes_on_without_it(live: LiveCoordinator, clock: Clock) -> None:
    cohort = Cohort(size=2, quorum=1, max_task_attempts=2, deadline_seconds=86400)
    client, run, (lost, good), (task, good_task) = begun(live, "a", "b", cohort=cohort)
    good.train(good_task, step=1.0)
    clock.advance(60)
    until(lambda: client.task(task.id).state == "offered")
    late = lost.take()
    clock.advance(60)
    until(lambda: client.run(run.id).state == "completed")
    assert [t.state for t in client.round(run.id, 1).tasks] == ["cancelled", "merged"]
    with refusing("round-closed"):
        lost.train(late, step=100.0)
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 1, rtol=1e-6)


def test_a_released_task_is_offered_again_at_once_and_costs_no_try(live: LiveCoordinator) -> None:
    client, _, (worker,), (task,) = begun(live, "a", cohort=Cohort(max_task_attempts=1))
    assert worker.client.release(task.id, task.token).state == "offered"
    again = ScriptedWorker(worker.client).take()
    assert (again.id, again.token) == (task.id, task.token + 1)
    assert client.task(task.id).attempts == 1
    with refusing("lease-lost"):
        worker.client.heartbeat(task.id, task.token)


def test_a_task_is_given_back_twenty_times_and_then_its_lease_has_to_expire(
    live: LiveCoordinator, clock: Clock
) -> None:
    client, _, (worker,), (task,) = begun(live, "a", cohort=Cohort(max_task_attempts=2))
    for _ in range(20):
        worker.client.release(task.id, task.token)
        task = worker.take()
    assert (task.token, client.task(task.id).attempts) == (21, 1)
    with refusing("conflict", "given back 20 times"):
        worker.client.release(task.id, task.token)
    clock.advance(60)
    until(lambda: client.task(task.id).state == "offered")
    task = worker.take()
    # Its second attempt, and the last.
    with refusing("conflict", "given back 20 times"):
        worker.client.release(task.id, task.token)
    assert worker.train(task).state == "accepted"


def test_a_full_disk_at_a_site_costs_no_attempt_and_is_said_where_people_look(
    live: LiveCoordinator, clock: Clock
) -> None:
    cohort = Cohort(size=2, quorum=2, deadline_seconds=50, max_attempts=1, max_task_attempts=1)
    client, run, (full, good), (task, other) = begun(live, "a", "b", cohort=cohort)
    full.client.release(task.id, task.token, "disk-full", "/state: No space left on device")
    (failure,) = task_failures(list(client.rounds(run.id)))
    assert (failure.worker, failure.end) == ("a/w", "given back")
    assert failure.reason == "disk-full: /state: No space left on device"
    assert "free some space" in failure.remedy
    # Once there is room, nothing is left of it.
    task = full.take()
    (view,) = (seen for seen in client.round(run.id, 1).tasks if seen.id == task.id)
    assert (view.attempts, view.problem) == (1, None)
    full.client.release(task.id, task.token, "disk-full", "/state: No space left on device")
    good.train(other)
    clock.advance(50)
    until(lambda: client.run(run.id).state == "paused")
    because = "1 of 2 updates came by the deadline; the quorum is 2 (a/w: disk-full)"
    assert client.run(run.id).reason == f"round 1 was abandoned 1 times, at last because {because}"


def test_a_failed_task_ends_and_the_round_goes_on(live: LiveCoordinator) -> None:
    client, run, (bad, good), (bad_task, good_task) = begun(live, "a", "b", cohort=Cohort(size=2, quorum=1))
    view = bad.client.fail(bad_task.id, Failure(token=bad_task.token, code="out-of-memory", detail="it does not fit"))
    assert view.state == "failed"
    assert view.problem is not None
    assert view.problem.detail == "out-of-memory: it does not fit"
    good.train(good_task)
    until(lambda: client.run(run.id).state == "completed")


# ---------------------------------------------------------------- deadlines


@EVERY_REPORT
def test_what_comes_after_a_deadline_that_the_quorum_met_came_too_late(
    live: LiveCoordinator, clock: Clock, report: str
) -> None:
    cohort = Cohort(size=2, quorum=1, deadline_seconds=50)
    client, run, (late, good), (late_task, good_task) = begun(live, "a", "b", cohort=cohort)
    good.train(good_task, step=1.0)
    clock.advance(50)
    until(lambda: client.run(run.id).state == "completed")
    assert client.round(run.id, 1).reason == "the deadline came"
    with refusing("round-closed"):
        REPORTS[report](late, late_task)
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 1, rtol=1e-6)


def test_a_round_without_its_quorum_is_tried_again_and_then_the_run_pauses(
    live: LiveCoordinator, clock: Clock
) -> None:
    cohort = Cohort(size=2, quorum=2, deadline_seconds=50, max_attempts=3)
    client, run, workers, tasks = begun(live, "a", "b", cohort=cohort)
    for attempt in (1, 2, 3):
        workers[0].train(tasks[0])
        clock.advance(50)
        until(lambda n=attempt: client.round(run.id, 1).attempt > n or client.run(run.id).state == "paused")
        if attempt < 3:
            tasks = [worker.take() for worker in workers]
    paused = client.run(run.id)
    because = "1 of 2 updates came by the deadline; the quorum is 2"
    assert paused.reason == f"round 1 was abandoned 3 times, at last because {because}"
    attempts = list(client.rounds(run.id))
    assert [(r.attempt, r.state) for r in attempts] == [(n, "abandoned") for n in (1, 2, 3)]
    assert attempts[0].reason == because
    assert paused.version.number == 0
    with refusing("task-cancelled"):
        workers[1].train(tasks[1])


@pytest.mark.parametrize("looks", [False, True], ids=["suspended", "unreachable"])
def test_a_round_outlives_an_outage_that_is_longer_than_a_worker_counts_as_live(
    live: LiveCoordinator, clock: Clock, looks: bool
) -> None:
    # From now on the conductor would miss who does not call.
    live.elapse(91, ScriptedWorker(live.client("site", "a")))
    cohort = Cohort(size=2, quorum=2, deadline_seconds=36_000)
    client, run, (first, second), (task, held) = begun(live, "a", "b", cohort=cohort)
    first.train(task)
    if looks:
        live.elapse(200)
    else:
        clock.advance(200)
    until(lambda: client.task(held.id).state == "offered")
    # The others have another 90 s to call.
    live.elapse(60, first)
    assert client.round(run.id, 1).state == "open"
    again = second.take()
    assert (again.id, again.token) == (held.id, held.token + 1)
    second.train(again)
    until(lambda: client.run(run.id).state == "completed")
    assert [round_.state for round_ in client.rounds(run.id)] == ["committed"]


def test_a_round_ends_without_a_worker_that_is_gone_while_others_call(live: LiveCoordinator) -> None:
    live.elapse(91, ScriptedWorker(live.client("site", "a")))
    cohort = Cohort(size=2, quorum=1, deadline_seconds=36_000)
    client, run, (here, _), (task, _) = begun(live, "a", "b", cohort=cohort)
    here.train(task)
    live.elapse(91, here)
    until(lambda: client.run(run.id).state == "completed")
    assert client.round(run.id, 1).reason == "all tasks ended"


def test_a_run_that_is_resumed_is_forgiven_its_failed_attempts(live: LiveCoordinator, clock: Clock) -> None:
    client, run, (worker,), (task,) = begun(live, "a", cohort=Cohort(max_attempts=1, deadline_seconds=50))
    clock.advance(50)
    until(lambda: client.run(run.id).state == "paused")
    with refusing("task-cancelled"):
        worker.client.heartbeat(task.id, task.token)
    clock.advance(1)
    client.set_run_state(run.id, "running")
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    assert [r.state for r in client.rounds(run.id)] == ["abandoned", "committed"]


def test_a_worker_that_was_not_heard_of_lately_is_not_asked(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    ScriptedWorker(live.client("site", "gone")).enrol()
    until(lambda: client.status().live_workers)
    clock.advance(91)
    here = ScriptedWorker(live.client("site", "here")).enrol()
    run = start_run(client, MODEL, START)
    here.train(here.take())
    until(lambda: client.run(run.id).state == "completed")
    assert [t.worker for t in client.round(run.id, 1).tasks] == ["here/w"]
    assert {(w.site, w.live) for w in client.workers()} == {("gone", False), ("here", True)}


def test_a_finished_run_waits_for_its_last_evaluation_but_not_for_ever(tmp_path: Path, clock: Clock) -> None:
    with LiveCoordinator(tmp_path, clock=clock, lease_seconds=60, evaluation_seconds=40) as live:
        client = live.client()
        judge = ScriptedWorker(live.client("site", "judge"), kinds=("evaluate",), datasets={"held-out": 5}).enrol()
        run = start_run(client, MODEL, START, evaluation=Evaluation(dataset="held-out", every=5))
        judge.evaluate(judge.take(), accuracy=0.5)
        worker = ScriptedWorker(live.client("site", "a"))
        worker.train(worker.take())
        last = judge.take()
        assert last.version.number == 1
        clock.advance(39)
        assert client.run(run.id).state == "running"
        judge.client.heartbeat(last.id, last.token)
        clock.advance(1.5)
        until(lambda: client.run(run.id).state == "completed")
        with refusing("task-cancelled"):
            judge.evaluate(last, accuracy=1.0)
