"""A database whose file is damaged is reported, once, and is no fault of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tessera.coordinator.db.engine import Database, DatabaseDamaged, reason_of
from tessera.coordinator.server.doctor import checks
from tessera.shared.diagnostics import examined
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import small_model, start_run, values
from tests.support.storage import add_run, migrated

pytestmark = pytest.mark.sqlite

PAGE = 4096


def damage(database: Database) -> None:
    """Overwrite all pages but the first, as a copy of the file that was taken between two of its writes may have
    them."""
    with database.engine.connect() as connection:
        connection.connection.dbapi_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[union-attr]
    database.engine.dispose()
    file = Path(database.url.database or "")
    with file.open("r+b") as opened:
        opened.seek(PAGE)
        opened.write(b"\xff" * (file.stat().st_size - PAGE))


def test_a_damaged_database_is_not_ready_says_so_once_and_pauses_no_run(coordinator: LiveCoordinator) -> None:
    client, model, services = coordinator.client(), small_model(), coordinator.services
    start_run(client, model, values(model), dataset="none")
    http = coordinator.bare({"Authorization": f"Bearer {coordinator.token('admin')}"})
    assert http.get("/healthz/ready").json()["database_intact"]
    with capture_logs() as logs:
        damage(services.database)
        answers = [http.get(path) for path in ("/v1/runs", "/metrics", "/v1/runs", "/page/")]
        ready = http.get("/healthz/ready")
        found = [one for one in examined(checks(services)) if one.verdict == "fail"]
    assert {answer.status_code for answer in answers[:3]} == {503}
    assert all(int(answer.headers["Retry-After"]) > 1 and "damaged" in answer.text for answer in answers[:3])
    assert (ready.status_code, ready.json()["ready"], ready.json()["database_intact"]) == (503, False, False)
    assert sum(line["event"] == "database.damaged" for line in logs) == 1
    assert [line["event"] for line in logs if "exc_info" in line] == []
    assert not any(line.get("action", "").startswith("Pause") for line in logs)
    assert any(one.name in ("file", "database") and "damaged" in one.detail for one in found)


def test_damage_below_pages_that_a_connection_keeps_in_memory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = migrated(tmp_path)
    with database.transaction() as session:
        add_run(session)
    assert database.check()
    monkeypatch.setattr(database.engine, "dispose", lambda: None)
    damage(database)
    with pytest.raises(DatabaseDamaged) as found:
        database.check()
    assert "damaged" in reason_of(found.value)
    monkeypatch.undo()
    database.close()


def test_a_damaged_page_that_nothing_read_yet_is_found_after_an_unclean_end(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    with database.transaction() as session:
        add_run(session)
    assert database.ended_uncleanly()
    assert database.check()
    assert not database.check(seconds=-1.0)
    damage(database)
    assert not Database(str(database.url)).ended_uncleanly()
    with pytest.raises(DatabaseDamaged):
        database.check()
    assert database.damage
    database.close()
