"""Guarded writes: a refused event leaves the row, and the audit chain, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from sqlalchemy import inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import AuditRow, RoundRow, RunRow, TaskRow, WorkerRow
from tessera.coordinator.db.transitions import move_back, move_round, move_run, move_task
from tessera.coordinator.domain.lifecycle import ROUND, RUN, TASK, Lifecycle
from tessera.shared.problems import Conflict
from tests.support.storage import NOW, add_round, add_run, add_task, add_worker

pytestmark = pytest.mark.both_databases


def states(lifecycle: Lifecycle) -> list[str]:
    return sorted({m.target for m in lifecycle.values()} | {s for m in lifecycle.values() for s in m.sources})


def facts(row: object) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in inspect(type(row)).columns}  # type: ignore[union-attr]


def actions(session: Session) -> list[str]:
    return list(session.scalars(select(AuditRow.action).order_by(AuditRow.seq)))


def test_pages_that_read_totals_instead_of_all_tasks_count_each_report_once(database: Database) -> None:
    with database.transaction() as session:
        run, round_, worker = add_run(session), add_round(session), add_worker(session)
        add_worker(session, "v")
        columns = {"upload_bytes": 10, "download_bytes": 300}
        tasks = {
            "update": ("w", {}, "accept", columns),
            "evaluation": ("w", {"kind": "evaluate", "round_id": None}, "accept", {"download_bytes": 7}),
            "signature": ("w", {"kind": "agree", "round_id": None}, "accept", columns),
            "failed": ("v", {}, "fail", {}),
            "rejected": ("v", {"round_id": None, "version_number": 1}, "reject", {}),
            "late": ("v", {"round_id": None, "version_number": 2}, "expire", {}),
        }
        for name, (worker_id, fields, event, values) in tasks.items():
            task = add_task(session, name, worker_id, "leased", **fields)
            move_task(session, NOW, "x", task, event, dict(values))
            with pytest.raises(Conflict):
                move_task(session, NOW, "x", task, event, dict(values))
        move_round(session, NOW, "x", round_, "close", None)
        session.refresh(run)
        session.refresh(worker)
        totals = (run.updates, run.fetches, run.upload_bytes, run.download_bytes, run.evaluation_bytes)
        assert totals == (1, 2, 10, 307, 7)
        other = session.get_one(WorkerRow, "v", populate_existing=True)
        assert [(one.accepted, one.faulty) for one in (worker, other)] == [(3, 0), (0, 2)]


def test_a_run_moves_only_from_the_sources_of_an_event(database: Database) -> None:
    for event, state in product(RUN, states(RUN)):
        run_id = f"{event}-{state}"
        with database.transaction() as session:
            add_run(session, run_id, state)
        before = run_facts(database, run_id)
        if state in RUN[event].sources:
            with database.transaction() as session:
                move_run(session, NOW + 1, "me", run_id, event, "because")
            after = run_facts(database, run_id)
            assert (after["state"], after["revision"], after["reason"]) == (RUN[event].target, 2, "because")
            assert after["resumed_at"] == (NOW + 1 if event == "resume" else NOW)
        else:
            with (
                pytest.raises(Conflict, match=f"not in a state to {event}"),
                database.transaction() as session,
            ):
                move_run(session, NOW + 1, "me", run_id, event, "because")
            assert run_facts(database, run_id) == before
    with database.snapshot() as session:
        moved = [event for event, state in product(RUN, states(RUN)) if state in RUN[event].sources]
        assert actions(session) == [f"run.{event}" for event in moved]


def run_facts(database: Database, run_id: str) -> dict[str, Any]:
    with database.snapshot() as session:
        return facts(session.get_one(RunRow, run_id))


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    """A run with an open round and a worker, in a transaction that comes to nothing."""
    with database.transaction() as session:
        add_run(session)
        add_round(session)
        add_worker(session)
        yield session
        session.rollback()


def undone(session: Session, lifecycle: Lifecycle) -> Iterator[tuple[str, str]]:
    """Each event with each state. What is done with one is rolled back before the next."""
    for event, state in product(lifecycle, states(lifecycle)):
        nested = session.begin_nested()
        yield event, state
        nested.rollback()


def test_a_round_moves_only_from_the_sources_of_an_event(session: Session) -> None:
    for event, state in undone(session, ROUND):
        row = session.get_one(RoundRow, "run-1-1")
        row.state = state
        session.flush()
        if state in ROUND[event].sources:
            move_round(session, NOW + 1, "me", row, event, "because")
            session.refresh(row)
            assert row.state == ROUND[event].target
            assert row.closed_at == (None if event == "close" else NOW + 1)
        else:
            before = facts(row)
            with pytest.raises(Conflict):
                move_round(session, NOW + 1, "me", row, event, "because")
            session.refresh(row)
            assert facts(row) == before
            assert actions(session) == []


def test_a_task_moves_only_from_the_sources_of_an_event(session: Session) -> None:
    for event, state in undone(session, TASK):
        row = add_task(session, "t", state=state)
        before = facts(row)
        if state in TASK[event].sources:
            move_task(session, NOW, "me", row, event)
            session.refresh(row)
            assert facts(row) == before | {"state": TASK[event].target}
        else:
            with pytest.raises(Conflict):
                move_task(session, NOW, "me", row, event, {"token": 99})
            session.refresh(row)
            assert facts(row) == before


def test_a_task_that_was_leased_anew_in_between_does_not_move(database: Database) -> None:
    with database.transaction() as session:
        add_run(session)
        add_round(session)
        add_worker(session)
        add_task(session, "t", state="leased", token=1)
    with database.snapshot() as reader:
        stale = reader.get_one(TaskRow, "t")
    with database.transaction() as session:
        session.get_one(TaskRow, "t").token = 2
    with pytest.raises(Conflict), database.transaction() as session:
        move_task(session, NOW, "me", stale, "accept")
    with database.snapshot() as session:
        assert session.get_one(TaskRow, "t").state == "leased"


# ---------------------------------------------------------------- what the schema forbids

# SQLite names the columns in its refusal, PostgreSQL the constraint.


@pytest.mark.parametrize("live", ["open", "merging"])
def test_a_run_has_one_live_round_at_most(session: Session, live: str) -> None:
    add_round(session, attempt=2, state="abandoned")
    with pytest.raises(IntegrityError, match=r"rounds\.run_id\n|uq_rounds_live"):
        add_round(session, attempt=3, state=live)


def test_a_worker_has_one_task_a_round(session: Session) -> None:
    add_task(session, "first", state="accepted")
    with pytest.raises(IntegrityError, match=r"tasks\.round_id, tasks\.worker_id|uq_tasks_round_id_worker_id"):
        add_task(session, "second", version_number=1)


@pytest.mark.parametrize("state", ["offered", "leased", "expired", "accepted", "merged"])
def test_a_worker_has_one_update_that_counts_from_each_version(session: Session, state: str) -> None:
    for attempt, over in enumerate(("left_out", "rejected", "failed", "cancelled"), start=2):
        add_round(session, attempt=attempt, state="abandoned")
        add_task(session, over, state=over, round_id=f"run-1-{attempt}")
    add_task(session, "counts", state=state)
    add_round(session, number=2, state="abandoned")
    add_task(session, "of the next version", round_id="run-2-1", version_number=1)
    add_round(session, number=3, state="abandoned")
    with pytest.raises(
        IntegrityError, match=r"tasks\.run_id, tasks\.version_number, tasks\.worker_id|uq_tasks_update"
    ):
        add_task(session, "again", round_id="run-3-1")


def test_a_version_is_made_once(session: Session) -> None:
    with pytest.raises(IntegrityError, match=r"versions\.run_id, versions\.number|pk_versions"):
        session.connection().exec_driver_sql(
            "INSERT INTO versions (run_id, number, digest, created_at) VALUES ('run', 0, 'other', 0)"
        )


def test_a_version_is_evaluated_once_on_the_central_data_set_by_whichever_worker(session: Session) -> None:
    add_worker(session, "v")
    add_task(session, "first", kind="evaluate", round_id=None)
    add_task(session, "later", kind="evaluate", round_id=None, version_number=1)
    with pytest.raises(IntegrityError, match=r"tasks\.run_id, tasks\.version_number\n|uq_tasks_central"):
        add_task(session, "again", "v", kind="evaluate", round_id=None)


def test_each_worker_evaluates_a_version_once_on_what_it_holds_out(session: Session) -> None:
    add_worker(session, "v")
    at_sites = {"kind": "evaluate", "round_id": None, "held_out": True}
    add_task(session, "central", kind="evaluate", round_id=None)
    add_task(session, "first", **at_sites)
    add_task(session, "other", "v", **at_sites)
    with pytest.raises(
        IntegrityError, match=r"tasks\.run_id, tasks\.version_number, tasks\.worker_id|uq_tasks_held_out"
    ):
        add_task(session, "again", **at_sites)


@pytest.mark.parametrize("held_out", [False, True])
def test_an_evaluation_that_failed_leaves_room_for_another_try(session: Session, held_out: bool) -> None:
    evaluation = {"kind": "evaluate", "round_id": None, "held_out": held_out}
    add_task(session, "failed", state="failed", **evaluation)
    add_task(session, "withdrawn", state="cancelled", **evaluation)
    add_task(session, "again", **evaluation)


def test_an_attempt_at_a_round_has_a_number_of_its_own(session: Session) -> None:
    again = RoundRow(**facts(session.get_one(RoundRow, "run-1-1")) | {"id": "other", "state": "abandoned"})
    session.add(again)
    with pytest.raises(
        IntegrityError, match=r"rounds\.run_id, rounds\.number, rounds\.attempt|uq_rounds_run_id_number"
    ):
        session.flush()


def test_nothing_refers_to_what_is_not_there(session: Session) -> None:
    with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
        add_round(session, run_id="nowhere")


def test_a_run_moved_back_ends_now_and_keeps_its_order_and_what_is_left_of_its_deadline(database: Database) -> None:
    with database.transaction() as session:
        run, worker = add_run(session), add_worker(session)
        for attempt, (opened, closed) in enumerate(((NOW - 50, NOW - 40), (NOW + 10, NOW + 20), (NOW + 30, None)), 1):
            round_ = add_round(session, attempt=attempt, state="abandoned" if closed else "open")
            round_.opened_at, round_.closed_at, round_.deadline_at = opened, closed, opened + 100
        add_task(session, "t", worker.id, round_id=None, kind="agree", created_at=NOW + 25)
        # The clock has lost an hour.
        move_back(session, NOW + 30 - 3600, run)
    with database.snapshot() as session:
        found = select(RoundRow.opened_at, RoundRow.closed_at, RoundRow.deadline_at).order_by(RoundRow.attempt)
        assert [tuple(at and at + 3600 - NOW for at in row) for row in session.execute(found)] == [
            (-50, -40, 50), (10, 20, 110), (30, None, 130),
        ]  # fmt: skip
        assert session.get_one(RunRow, "run").resumed_at == NOW - 3600
        assert session.get_one(TaskRow, "t").created_at == NOW + 25 - 3600
