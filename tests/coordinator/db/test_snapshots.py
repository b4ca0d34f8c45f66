"""What the conductor remembers of a run is about that run of that database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from tessera.coordinator.db.snapshots import run_snapshot, runs_to_decide, terms_of
from tessera.coordinator.domain.workers import LiveWorker
from tests.support.storage import add_round, add_run, add_worker, migrated

DIGEST = f"sha256:{'0' * 64}"
SPEC = {"name": "run", "method": {"name": "fedavg"}, "model": DIGEST, "version": DIGEST, "dataset": "data"}


@pytest.mark.parametrize("rounds", [(1, 2), (2, 1)])
def test_runs_of_two_databases_may_have_one_id(tmp_path: Path, rounds: tuple[int, int]) -> None:
    found = []
    for number in rounds:
        database = migrated(tmp_path / str(number))
        with database.transaction() as session:
            add_run(session).spec = {**SPEC, "rounds": number}
        with database.snapshot() as session:
            found.append(terms_of(session, "run").spec.rounds)
        database.close()
    assert tuple(found) == rounds


@pytest.mark.sqlite
def test_a_look_at_a_run_reads_only_its_tasks_that_are_not_over(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    asked: list[tuple[str, Any]] = []
    declared = {
        "kinds": ["train", "evaluate"],
        "datasets": {"data": 9},
        "held_out": {"data": 1},
        "schemas": [],
        "methods": ["fedavg"],
    }
    with database.transaction() as session:
        add_run(session).spec = {**SPEC, "rounds": 2, "evaluation": {"sites": True}}
        add_round(session)
        add_worker(session)

    @event.listens_for(database.engine, "before_cursor_execute")
    def _note(connection: object, cursor: object, statement: str, parameters: Any, *more: object) -> None:
        asked.append((statement, parameters))

    with database.snapshot() as session:
        assert runs_to_decide(session) == ["run"]
        run = run_snapshot(session, "run", [LiveWorker("w", "site/w", "site", declared)], absent_are_gone=True)
        assert [due.worker for due in run.unevaluated] == ["w"]
        questions = [(sql, given) for sql, given in asked if "FROM tasks" in sql]
        explained = [
            session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", given) for sql, given in questions
        ]
        plans = [step.detail.split() for plan in explained for step in plan if "tasks" in step.detail]
    database.close()
    indexes = [words[words.index("INDEX") + 1] for words in plans]
    assert indexes == ["ix_tasks_open", "ix_tasks_run_id_kind_state", "sqlite_autoindex_tasks_2", "ix_tasks_moved"]
