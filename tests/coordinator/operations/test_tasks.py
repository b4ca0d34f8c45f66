"""What a submission costs the database: its rows are loaded by one query, and its run's settings are known."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from tessera.coordinator.db import tasks
from tessera.coordinator.db.tables import RunRow, TaskRow, TokenRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations.tasks import lease, submit_update
from tessera.shared.api.tasks import Submission
from tessera.shared.problems import Unauthenticated
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()


def test_a_submission_loads_its_task_and_no_run(coordinator: LiveCoordinator) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    digest = worker.upload(task, {MODEL.blocks[0].name: values(MODEL)[MODEL.blocks[0].name] + 1})
    with coordinator.services.database.snapshot() as session:
        site = tasks.find_task(session, task.id, None).worker.site_id
    with loading() as loaded:
        report = Submission(token=task.token, version=task.version.digest, update=digest, examples=10)
        caller = Principal("t", "a", "site", site)
        view = submit_update(coordinator.services, caller, task.id, report)
    assert view.state == "accepted"
    # The task's own row is read again where the outcome is written: the inspection took its time.
    assert loaded == ["TaskRow", "TaskRow"]


@pytest.mark.sqlite
def test_a_worker_woken_for_an_update_that_it_holds_takes_no_turn_of_writers(coordinator: LiveCoordinator) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    start_run(coordinator.client(), MODEL, values(MODEL))
    task, database, here = worker.take(), coordinator.services.database, threading.get_ident()
    with database.snapshot() as session:
        row = tasks.find_task(session, task.id, None).worker
        caller, asked = Principal(row.token_id or "", "a", "site", row.site_id), list[str]()

    @event.listens_for(database.engine, "before_cursor_execute")
    def _note(connection: object, cursor: object, statement: str, *more: object) -> None:
        if threading.get_ident() == here:
            asked.append(statement)

    assert lease(coordinator.services, caller, row.id, "another", [task.id], woken=True) is None
    assert "BEGIN" in asked
    assert "BEGIN IMMEDIATE" not in asked
    # A claim that waits with a token is woken when that is revoked.
    with database.transaction() as session:
        session.get_one(TokenRow, row.token_id).revoked_at = 1.0
    with pytest.raises(Unauthenticated):
        lease(coordinator.services, caller, row.id, "another", [task.id], woken=True)


@contextmanager
def loading() -> Iterator[list[str]]:
    """The rows of runs and tasks that this thread loads."""
    loaded, here = list[str](), threading.get_ident()

    def note(row: Any, _: object) -> None:
        if threading.get_ident() == here:
            loaded.append(type(row).__name__)

    for row in (RunRow, TaskRow):
        event.listen(row, "load", note)
    try:
        yield loaded
    finally:
        for row in (RunRow, TaskRow):
            event.remove(row, "load", note)
