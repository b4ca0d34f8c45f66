"""Pages and metrics read what they show, and not all that ever happened."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, update

from tessera.coordinator.dashboard import records
from tessera.coordinator.dashboard.records import SEARCHED
from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import AuditRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.schema import TokenRole
from tests.coordinator.dashboard.conftest import Person, signed_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import Evaluation, ScriptedWorker, small_model, start_run, values
from tests.support.storage import statements

GROWING = ("tasks", "audit", "rounds", "versions")
"""Tables with rows of all rounds."""
FEW = ("ix_tasks_open", "ix_tasks_faulty", "ix_tasks_faulty_leases", "ix_rounds_others", "uq_rounds_live")
"""Indexes of few of their rows."""


@pytest.mark.sqlite
@pytest.mark.parametrize("role", ["admin", "orchestrator"])
def test_no_page_or_scrape_scans_a_table_that_grows_with_every_round(
    coordinator: LiveCoordinator, role: TokenRole
) -> None:
    """Neither for a reader of all studies, nor for one of one of two."""
    coordinator.token("viewer", studies=["another"])
    person, model = signed_in(coordinator, role), small_model()
    run, other = (start_run(coordinator.client(), model, values(model), dataset="none").id for _ in range(2))
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    mine = start_run(coordinator.client(), model, values(model), evaluation=Evaluation(sites=True))
    worker.take()
    late = start_run(coordinator.client(), model, values(model), cohort=Cohort(mode="buffer", quorum=1)).id
    until(lambda: list(coordinator.client().rounds(late)))
    asked: dict[str, Any] = {}

    @event.listens_for(coordinator.services.database.engine, "before_cursor_execute")
    def _note(connection: object, cursor: object, statement: str, parameters: Any, *more: object) -> None:
        asked[statement] = parameters

    for path in (
        f"/runs/{late}", f"/runs/{late}/rounds/1",
        "/", "/runs", "/runs?state=paused&q=a", f"/runs/{run}", f"/runs/{run}/rounds", "/sites", "/approvals",
        "/failures", "/failures?what=failed", f"/failures?run={run}", "/failures?since=2026-01-01T00:00", "/storage",
        "/audit", "/audit?who=a&what=b", f"/audit?run={run}&what=b", "/audit?since=2026-01-01T00:00",
        "/audit?until=2026-01-01T00:00", "/runs/new?method=fedavg", f"/runs/compare?run={run}&run={other}",
    ):  # fmt: skip
        admitted = role == "admin" or not path.startswith("/audit")
        assert person.http.get(f"/page{path}").status_code == (200 if admitted else 403), path
    http = coordinator.http(role)
    of_late = (f"/v1/runs/{late}/rounds/1", f"/v1/runs/{late}/coverage")
    for path in ("/metrics", "/v1/admin/status", "/v1/runs", "/v1/workers", f"/v1/runs/{run}/rounds", *of_late):
        http.get(path).raise_for_status()
    site = Person(coordinator)
    site.sign_in(coordinator.token("site", "a"))
    for path in ("/site", f"/site/runs/{mine.id}"):
        assert site.http.get(f"/page{path}").status_code == 200, path
    coordinator.client().status()
    coordinator.services.conductor.step()
    with coordinator.services.database.snapshot() as session:
        # SQLite plans without regard to the rows that there are.
        plans = [
            (statement, step.detail)
            for statement, given in list(asked.items())
            if statement.startswith(("SELECT", "UPDATE", "DELETE"))
            for step in session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given)
        ]
    scans = [(sql, detail.split()) for sql, detail in plans if detail.startswith("SCAN ") and "LIMIT" not in sql]
    assert [plan for plan in scans if plan[1][1] in GROWING and plan[1][-1] not in FEW] == []
    assert {table for _, detail in plans for table in GROWING if table in detail.split()} == set(GROWING)


def test_the_lists_of_runs_ask_as_many_questions_of_many_runs_as_of_one(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    model, counts = small_model(), []
    for number in range(4):
        start_run(coordinator.client(), model, values(model), name=f"run-{number}", dataset="none")
        if number in (0, 3):
            for path in ("/page/runs", "/page/"):
                asked = []
                for _ in range(3):
                    with statements(coordinator.services.database) as seen:
                        admin.http.get(path).raise_for_status()
                    asked.append(sum("metrics" in one for one in seen))
                # The conductor may ask something meanwhile.
                counts.append(min(asked))
    assert counts[:2] == counts[2:]


def test_a_filtered_page_of_the_audit_looks_through_a_bounded_number_of_entries(
    coordinator: LiveCoordinator, admin: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SEARCHED >= 10_000
    monkeypatch.setattr(records, "SEARCHED", 5)
    with coordinator.services.database.transaction() as session:
        for number in range(20):
            audit.record(session, 1e6 + number, "nobody", "early" if number < 2 else "late", "x")
        session.execute(update(AuditRow).where(AuditRow.action != "late").values(at=1000.0))
        first = session.query(AuditRow.seq).filter(AuditRow.action == "early").order_by(AuditRow.seq).first()[0]
    place, steps = "/page/audit?what=early", 0
    while ">early<" not in (shown := admin.http.get(place).text):
        assert "No entry matches" in shown
        found = shown.rpartition('rel="next"')[0].rpartition('href="')[2].partition('"')[0]
        place, steps = found.replace("&amp;", "&"), steps + 1
    assert steps == (20 - 1 - 1) // 5
    # A time is found at once.
    monkeypatch.setattr(records, "CLOCK_SECONDS", 0.0)
    assert admin.http.get("/page/audit?until=1970-01-02T00:00").text.count(">early<") == 2
    assert f"before={first}" not in admin.http.get("/page/audit?since=1970-01-02T00:00&what=early").text
