"""A coordinator's clock that is set back by a day stops no run, and makes no earlier result the latest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from tessera.coordinator.db.tables import RunRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.tasks import Submission
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

DAY = 86_400.0
MODEL = small_model()
START = values(MODEL)


@pytest.fixture
def live(tmp_path: Path, clock: Clock) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path, clock=clock, cohort_wait_seconds=45) as coordinator:
        yield coordinator


def set_back(live: LiveCoordinator, clock: Clock) -> None:
    clock.advance(-DAY)
    # A process limits rates by a clock that nobody sets.
    live.services.admission._tokens._full_at.clear()
    until(lambda: is_caught_up(live, clock))


def is_caught_up(live: LiveCoordinator, clock: Clock) -> bool:
    """Whether no run goes by an instant that is ahead."""
    with live.services.database.snapshot() as session:
        return all(at <= clock.at for at in session.scalars(select(RunRow.resumed_at)))


def test_the_last_receipt_and_audit_head_are_those_of_the_last_round(live: LiveCoordinator, clock: Clock) -> None:
    worker = ScriptedWorker(live.client("site", "a"))
    start_run(live.client(), MODEL, START, rounds=3, cohort=Cohort(size=1, quorum=1))
    for head in ("1" * 64, "2" * 64):
        task = worker.take()
        update = worker.upload(task, {"head.weight": worker.fetch(task)["head.weight"] + 1})
        report = {"token": task.token, "version": task.version.digest, "update": update, "examples": 10}
        worker.client.submit(task.id, Submission(audit_head=head, **report))
        set_back(live, clock)
    third = worker.take()
    assert third.receipt
    assert (third.receipt.task, third.receipt.state, third.audit_head) == (task.id, "merged", head)


def test_a_run_waits_for_further_sites_no_longer_than_it_would_have(live: LiveCoordinator, clock: Clock) -> None:
    worker = ScriptedWorker(live.client("site", "a")).enrol()
    run = start_run(live.client(), MODEL, START)
    set_back(live, clock)
    live.elapse(60, worker)
    worker.train(worker.take())
    until(lambda: live.client().run(run.id).state == "completed")


def test_a_resumed_run_is_not_paused_for_what_failed_before(live: LiveCoordinator, clock: Clock) -> None:
    worker, client = ScriptedWorker(live.client("site", "a")), live.client()
    run = start_run(client, MODEL, START, cohort=Cohort(size=1, quorum=1, max_attempts=1))
    worker.fail(worker.take())
    until(lambda: client.run(run.id).state == "paused")
    set_back(live, clock)
    clock.advance(1)
    client.set_run_state(run.id, "running")
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
