"""What a submission costs the database: its rows are loaded by one query, and its run's settings are parsed once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import event

from tessera.coordinator.db import tasks
from tessera.coordinator.db.tables import RunRow, TaskRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations.tasks import submit_update
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.tasks import Submission
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()


def test_a_submission_loads_its_run_once(coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    digest = worker.upload(task, {MODEL.blocks[0].name: values(MODEL)[MODEL.blocks[0].name] + 1})
    database, here = coordinator.services.database, threading.get_ident()
    with database.snapshot() as session:
        site = tasks.find_task(session, task.id, None).worker.site_id
    loaded: list[str] = []

    def note(row: Any, _: object) -> None:
        if threading.get_ident() == here:
            loaded.append(type(row).__name__)

    class Counted(RunSpec):
        @classmethod
        def model_validate(cls, *arguments: Any, **named: Any) -> RunSpec:  # type: ignore[override]
            note(RunSpec.model_construct(), None)
            return RunSpec.model_validate(*arguments, **named)

    monkeypatch.setattr(tasks, "RunSpec", Counted)
    for row in (RunRow, TaskRow):
        event.listen(row, "load", note)
    try:
        report = Submission(token=task.token, version=task.version.digest, update=digest, examples=10)
        caller = Principal("t", "a", "site", site)
        view = submit_update(coordinator.services, caller, task.id, report)
    finally:
        for row in (RunRow, TaskRow):
            event.remove(row, "load", note)
    assert view.state == "accepted"
    # The task's own row is read again where the outcome is written: the inspection took its time.
    assert sorted(loaded) == ["RunRow", "RunSpec", "TaskRow", "TaskRow"]
