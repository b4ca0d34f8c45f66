"""Claiming: who is offered what, how long one waits, and what becomes of an answer that was lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import select

from tessera.coordinator.db.tables import WorkerRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.problems import NameInUse
from tests.support.coordinator import WAIT_SECONDS, Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

CLAIM = {"worker": "w", "instance": "0" * 32, "datasets": {"data": 10}, "methods": ["fedavg"]}


def test_a_waiting_claim_is_answered_as_soon_as_a_round_opens(tmp_path: Path) -> None:
    # By nothing but that: in its own time it would look again after ten minutes.
    with LiveCoordinator(tmp_path, tick_seconds=600, max_wait_seconds=60.0) as coordinator:
        client, model = coordinator.client(), small_model()
        worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(worker.claim, 60)
            until(lambda: coordinator.services.waiters.workers)
            start_run(client, model, values(model))
            task = waiting.result()
        assert task
        assert task.kind == "train"


def test_a_claim_without_a_wait_is_answered_at_once_and_with_one_after_it(tmp_path: Path) -> None:
    # The client gives up long before a claim would that waited as long as it may.
    with LiveCoordinator(tmp_path, max_wait_seconds=10 * WAIT_SECONDS) as coordinator:
        http = coordinator.http("site", "a")
        for prefer, least in (("", 0), ("wait=0", 0), ("respond-async, wait=1", 1)):
            began = time.monotonic()
            answer = http.post("/v1/tasks/claim", json=CLAIM, headers={"Prefer": prefer})
            assert (answer.status_code, answer.content) == (204, b"")
            assert time.monotonic() - began >= least


def test_nobody_waits_longer_than_the_coordinator_allows(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, max_wait_seconds=0.2) as live:
        answer = live.http("site", "a").post("/v1/tasks/claim", json=CLAIM, headers={"Prefer": "wait=9999"})
        assert answer.status_code == 204


def test_who_waits_is_sent_home_when_the_coordinator_stops(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with LiveCoordinator(tmp_path, max_wait_seconds=10 * WAIT_SECONDS) as live:
            worker = ScriptedWorker(live.client("site", "a"))
            waiting = pool.submit(worker.claim, int(10 * WAIT_SECONDS))
            until(lambda: live.services.waiters.workers)
        assert waiting.result(WAIT_SECONDS) is None


def test_an_answer_that_was_lost_is_given_again_to_the_same_process(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start_run(client, model, values(model))
    site = coordinator.client("site", "a")
    worker = ScriptedWorker(site)
    first = worker.take()
    again = worker.take()
    assert (again.id, again.token) == (first.id, first.token)
    assert ScriptedWorker(site).claim(0) is None
    assert site.task(first.id).attempts == 1


def test_a_second_process_of_the_name_is_given_another_task_and_never_the_same(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    for _ in range(2):
        start_run(client, model, values(model))
    site = coordinator.client("site", "a")
    tasks = [ScriptedWorker(site).take() for _ in range(2)]
    assert len({task.id for task in tasks}) == 2
    assert ScriptedWorker(site).claim(0) is None


def test_two_machines_of_one_name_do_not_act_as_one_worker(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, liveness_seconds=90) as live:
        site = live.client("site", "a")
        ours, theirs = (ScriptedWorker(site, state_id=digit * 64, started_at=5) for digit in "12")
        ours.enrol()
        clock.advance(80)
        with pytest.raises(NameInUse, match="called w, and sent a request 80 s ago") as refusal:
            theirs.enrol()
        assert refusal.value.retry_after_seconds == 11
        assert "another name" in refusal.value.advice
        # A refused claim keeps no name in use: it is free 90 s after the other's last request.
        clock.advance(11)
        theirs.enrol()
        with pytest.raises(NameInUse):
            ours.enrol()


def test_a_restarted_worker_is_not_taken_for_another_of_its_name(coordinator: LiveCoordinator) -> None:
    site = coordinator.client("site", "a")
    ScriptedWorker(site).enrol()
    # It gets a state folder, and is then restarted twice with it.
    for started_at in (5.0, 6.0, 7.0):
        ScriptedWorker(site, state_id="1" * 64, started_at=started_at).enrol()


def test_of_two_copies_of_a_state_folder_the_one_started_first_is_refused(coordinator: LiveCoordinator) -> None:
    site = coordinator.client("site", "a")
    original, copy = (ScriptedWorker(site, state_id="1" * 64, started_at=at).enrol() for at in (5, 6))
    with pytest.raises(NameInUse):
        original.enrol()
    copy.enrol()


def test_a_worker_without_a_state_folder_does_not_take_a_name_in_use(coordinator: LiveCoordinator) -> None:
    site = coordinator.client("site", "a")
    ScriptedWorker(site, state_id="1" * 64).enrol()
    with pytest.raises(NameInUse):
        ScriptedWorker(site).enrol()


def test_revoking_a_workers_token_frees_its_name_at_once(coordinator: LiveCoordinator) -> None:
    ScriptedWorker(coordinator.client("site", "a"), state_id="1" * 64).enrol()
    admin, new = coordinator.client(), ScriptedWorker(coordinator.client("site", "a"), state_id="2" * 64)
    with pytest.raises(NameInUse):
        new.enrol()

    def shown() -> str | None:
        """The worker's token, once its request was stored."""
        with coordinator.services.database.snapshot() as session:
            return session.scalar(select(WorkerRow.token_id))

    until(shown)
    admin.revoke_token(shown() or "")
    new.enrol()


def test_sixteen_processes_at_once_get_a_task_each_or_none(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start = values(model)
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    for _ in range(6):
        start_run(client, model, start)
    until(lambda: sum(run.round is not None for run in client.status().live_runs) == 6)
    workers = [ScriptedWorker(coordinator.client("site", "a")) for _ in range(16)]
    barrier = Barrier(16)

    def claim(worker: ScriptedWorker) -> str | None:
        barrier.wait()
        task = worker.claim(0)
        return task.id if task else None

    with ThreadPoolExecutor(16) as pool:
        first = list(pool.map(claim, workers))
        second = list(pool.map(claim, workers))
    got = [task for task in first if task is not None]
    assert len(got) == len(set(got))
    # Who lost the race for one task is told there is nothing now, and asks again.
    held = {task for task in (*first, *second) if task is not None}
    assert len(held) == 6
    rounds = [one for run in client.status().live_runs for one in client.rounds(run.run)]
    assert [one.tasks[0].attempts for one in rounds] == [1] * 6


def test_a_round_is_offered_only_to_who_is_allowed_able_and_willing(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()

    def worker(site: str, **declared: object) -> ScriptedWorker:
        return ScriptedWorker(coordinator.client("site", site), **declared).enrol()

    wanted = worker("a")
    others = [
        worker("not-allowed"),
        worker("b", name="no-data", datasets={"data": 0}),
        worker("b", name="other-data", datasets={"other": 9}),
        worker("b", name="evaluates-only", kinds=("evaluate",)),
        worker("b", name="old", methods=("fedfrozen",)),
    ]
    run = start_run(client, model, values(model), cohort=Cohort(sites=("a", "b")))
    task = wanted.take()
    assert [t.worker for t in client.round(run.id, 1).tasks] == ["a/w"]
    assert all(other.claim(0) is None for other in others)
    wanted.train(task)


def test_what_a_worker_declares_is_what_the_administrator_sees(coordinator: LiveCoordinator) -> None:
    site = coordinator.client("site", "a")
    ScriptedWorker(site, datasets={"x": 1}).enrol()
    ScriptedWorker(site, datasets={"x": 2, "y": 3}).enrol()
    (seen,) = coordinator.client().workers()
    assert (seen.site, seen.name, seen.datasets, seen.live) == ("a", "w", {"x": 2, "y": 3}, True)
