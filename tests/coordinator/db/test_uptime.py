"""When workers called: the last instant, and the hours as bits, which both databases shift."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from tessera.coordinator.dashboard.workers import uptime
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import WorkerRow
from tessera.coordinator.db.workers import note_seen
from tests.support.storage import add_worker

pytestmark = pytest.mark.both_databases


def test_hours_are_seen_if_the_worker_called_within_them(database: Database) -> None:
    with database.transaction() as session:
        add_worker(session)
        worker = session.scalars(select(WorkerRow)).one()
        worker.created_at, worker.last_seen_at, worker.seen_hour, worker.seen_hours = 0.0, 0.0, 0, 0
        session.flush()
        for hour in (100, 101, 101, 104):
            note_seen(session, 3600.0 * hour, {worker.id: (3600.0 * hour, "t")})
        session.expire(worker)
        assert uptime(worker, 3600.0 * 105)[-7:] == [False, True, True, False, False, True, False]
        assert not any(uptime(worker, 3600.0 * 400))
        # A worker that was away for longer than hours are kept; and one that is new.
        note_seen(session, 3600.0 * 300, {worker.id: (3600.0 * 300, "t")})
        session.expire(worker)
        worker.created_at = 3600.0 * 299
        assert uptime(worker, 3600.0 * 300)[-3:] == [None, False, True]


def test_a_clock_that_steps_back_keeps_no_worker_live_and_no_old_token(database: Database) -> None:
    with database.transaction() as session:
        add_worker(session, "calling")
        add_worker(session, "gone")
        note_seen(session, 9000.0, {"calling": (9000.0, "old"), "gone": (9000.0, "old")})
        note_seen(session, 1002.0, {"calling": (1001.0, "new")})
        rows = session.execute(
            select(WorkerRow.id, WorkerRow.last_seen_at, WorkerRow.token_id).order_by(WorkerRow.id)
        ).all()
    # The one that called no more counts as live for a while from the step on.
    assert rows == [("calling", 1001.0, "new"), ("gone", 1002.0, "old")]


def test_an_earlier_call_that_is_stored_later_changes_nothing(database: Database) -> None:
    with database.transaction() as session:
        add_worker(session)
        note_seen(session, 1010.0, {"w": (1010.0, "new")})
        note_seen(session, 1011.0, {"w": (1005.0, "old")})
        assert session.execute(select(WorkerRow.last_seen_at, WorkerRow.token_id)).one() == (1010.0, "new")
