"""What a submission costs the database: its rows are loaded by one query, and its run's settings are known."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from tessera.coordinator.db import tasks
from tessera.coordinator.db.tables import RunRow, TaskRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations.tasks import submit_update
from tessera.shared.api.tasks import Submission
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()


def test_a_submission_loads_its_task_and_no_run(coordinator: LiveCoordinator) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
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
