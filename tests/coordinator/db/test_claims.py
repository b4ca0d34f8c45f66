"""Many threads after few tasks: each task goes to one, and nobody is told that the database is locked."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tessera.coordinator.db import tasks
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import TaskRow, VersionRow
from tessera.shared.problems import Conflict
from tests.support.storage import NOW, add_round, add_run, add_task, add_worker

pytestmark = pytest.mark.both_databases

THREADS, TASKS = 16, 60
DIGEST = f"sha256:{'0' * 64}"


def test_sixteen_threads_claim_each_task_once(database: Database) -> None:
    with database.transaction() as session:
        add_run(session)
        add_worker(session)
        for number in range(TASKS):
            if number:
                session.add(VersionRow(run_id="run", number=number, digest=DIGEST, created_at=NOW))
            add_round(session, number=number, state="abandoned")
            round_id = f"run-{number}-1"
            add_task(session, f"t{number:02}", round_id=round_id, version_number=number, token=0, attempts=0)
    barrier = Barrier(THREADS)

    def claim(instance: int) -> list[str]:
        barrier.wait()
        got = []
        while True:
            with database.transaction() as session:
                # An instance is given its own task again, so each lease is under a new name.
                record = tasks.claimable(session, "w", f"{instance}-{len(got)}")
                if record is None:
                    return got
                tasks.lease(session, NOW, "me", record.task, f"{instance}-{len(got)}", 60)
                got.append(record.task.id)

    with ThreadPoolExecutor(THREADS) as pool:
        got = [task for each in pool.map(claim, range(THREADS)) for task in each]
    assert Counter(got) == {f"t{number:02}": 1 for number in range(TASKS)}
    with database.snapshot() as session:
        assert {(t.token, t.attempts, t.state) for t in session.query(TaskRow)} == {(1, 1, "leased")}


def test_two_that_saw_the_same_offer_do_not_both_get_it(database: Database) -> None:
    with database.transaction() as session:
        add_run(session)
        add_round(session)
        add_worker(session)
        add_task(session, "t", token=0, attempts=0)
    with database.snapshot() as one, database.snapshot() as other:
        seen = [tasks.claimable(reader, "w", name) for reader, name in ((one, "a" * 16), (other, "b" * 16))]
    outcomes = []
    for offer, name in zip(seen, ("a", "b"), strict=True):
        assert offer is not None
        try:
            with database.transaction() as session:
                tasks.lease(session, NOW, "me", session.merge(offer.task, load=False), name * 16, 60)
            outcomes.append("leased")
        except Conflict:
            outcomes.append("conflict")
    assert outcomes == ["leased", "conflict"]


def test_a_task_whose_update_is_held_keeps_its_worker_from_no_other(database: Database) -> None:
    with database.transaction() as session:
        add_run(session)
        add_round(session)
        add_round(session, number=2, state="committed")
        add_worker(session)
        add_task(session, "held", state="leased", instance="a" * 16)
        session.add(VersionRow(run_id="run", number=1, digest=DIGEST, created_at=NOW))
        add_task(session, "next", round_id="run-2-1", version_number=1, token=0, attempts=0)
    with database.snapshot() as session:
        found = [tasks.claimable(session, "w", "a" * 16, holding) for holding in ((), ("held",), ("held", "next"))]
        assert [record and record.task.id for record in found] == ["held", "next", None]
        assert not tasks.is_claimable(session, "w", "a" * 16, ("held", "next"))


def test_readers_neither_wait_for_a_writer_nor_see_half_of_what_it_does(database: Database) -> None:
    with database.transaction() as session:
        add_run(session)
        with database.snapshot() as reader:
            assert reader.connection().exec_driver_sql("SELECT count(*) FROM runs").scalar() == 0
    with database.snapshot() as reader:
        assert reader.connection().exec_driver_sql("SELECT count(*) FROM runs").scalar() == 1
