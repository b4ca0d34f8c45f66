"""The hours in which a worker called are kept as bits, which both databases shift."""

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
            note_seen(session, {worker.id: (3600.0 * hour, "t")})
        session.expire(worker)
        assert uptime(worker, 3600.0 * 105)[-7:] == [False, True, True, False, False, True, False]
        assert not any(uptime(worker, 3600.0 * 400))
        # A worker that was away for longer than hours are kept; and one that is new.
        note_seen(session, {worker.id: (3600.0 * 300, "t")})
        session.expire(worker)
        worker.created_at = 3600.0 * 299
        assert uptime(worker, 3600.0 * 300)[-3:] == [None, False, True]
