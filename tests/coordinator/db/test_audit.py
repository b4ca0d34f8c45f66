"""The audit chain: it holds, and whatever is changed in it is found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import update

from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import AuditRow
from tests.support.storage import NOW

pytestmark = pytest.mark.both_databases


def recorded(database: Database, count: int = 5) -> None:
    for number in range(1, count + 1):
        with database.transaction() as session:
            audit.record(session, NOW + number / 3, "me", "act", f"s{number}", run_id="r", detail=number, text="ü")


def broken_at(database: Database) -> int | None:
    with database.snapshot() as session:
        return audit.broken_at(session)


def test_an_untouched_chain_holds(database: Database) -> None:
    assert broken_at(database) is None
    recorded(database)
    assert broken_at(database) is None


@pytest.mark.both_databases(long="postgresql")
@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE audit SET actor = 'you' WHERE seq = 3",
        "UPDATE audit SET action = 'react' WHERE seq = 3",
        "UPDATE audit SET subject = 's4' WHERE seq = 3",
        "UPDATE audit SET at = at + 0.000001 WHERE seq = 3",
        "UPDATE audit SET run_id = NULL WHERE seq = 3",
        """UPDATE audit SET detail = '{"detail": 4, "text": "ü"}' WHERE seq = 3""",
        "UPDATE audit SET digest = (SELECT digest FROM audit WHERE seq = 2) WHERE seq = 3",
        "UPDATE audit SET previous = (SELECT digest FROM audit WHERE seq = 1) WHERE seq = 3",
        "DELETE FROM audit WHERE seq = 3",
        "UPDATE audit SET seq = 6 WHERE seq = 3",
    ],
)
def test_whatever_is_changed_is_found_where_it_was_changed(database: Database, tampering: str) -> None:
    recorded(database)
    with database.engine.begin() as connection:
        assert connection.exec_driver_sql(tampering).rowcount
    assert broken_at(database) == 3


def test_an_entry_that_is_forged_with_its_own_digest_breaks_the_next_one(database: Database) -> None:
    recorded(database)
    with database.transaction() as session:
        rows = session.connection().exec_driver_sql("SELECT at, previous FROM audit WHERE seq = 3").one()
        entry = {"seq": 3, "at": rows.at, "actor": "you", "action": "act", "subject": "s3", "run_id": "r"}
        detail = {"detail": 3, "text": "ü"}
        digest = audit.link(rows.previous, {**entry, "detail": detail})
        session.execute(update(AuditRow).where(AuditRow.seq == 3).values(actor="you", digest=digest))
    assert broken_at(database) == 4


def test_threads_that_record_at_once_make_one_chain(database: Database) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: recorded(database, 10), range(8)))
    with database.snapshot() as session:
        assert session.connection().exec_driver_sql("SELECT count(*), max(seq) FROM audit").one() == (80, 80)
    assert broken_at(database) is None


def test_a_change_that_is_rolled_back_leaves_no_entry(database: Database) -> None:
    recorded(database, 1)
    with database.transaction() as session:
        audit.record(session, NOW, "me", "act", "s2")
        session.rollback()
    recorded(database, 1)
    assert broken_at(database) is None
