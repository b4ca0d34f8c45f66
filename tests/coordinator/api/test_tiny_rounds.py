"""The cost of a round of a few kilobytes: transactions, statements, requests and bytes on the wire."""

from __future__ import annotations

import io
import threading

import pytest
from sqlalchemy import event

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import AuditRow, RoundRow, UploadRow
from tessera.shared.api.tasks import Submission, Task, TaskView
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.storage import statements

pytestmark = pytest.mark.both_databases

MODEL = small_model()


def update_of(worker: ScriptedWorker, task: Task, step: float = 1.0) -> bytes:
    """An update that moves each value by `step`."""
    file, base = io.BytesIO(), worker.fetch(task)
    moved = {name: ArrayTensor(array + array.dtype.type(step), "F32") for name, array in base.items()}
    write_update(file, task.codec, [TrainedBlock(MODEL.by_name[n], moved[n], ArrayTensor(base[n])) for n in moved])
    return file.getvalue()


def submit(worker: ScriptedWorker, task: Task, data: bytes, digest: str | None = None) -> TaskView:
    report = {"token": task.token, "version": task.version.digest, "data": data, "examples": 10}
    return worker.client.submit(task.id, Submission(update=digest or digest_of(data), **report))


def workers_of(coordinator: LiveCoordinator, count: int) -> list[ScriptedWorker]:
    workers = [ScriptedWorker(coordinator.client("site", f"s{number}")) for number in range(count)]
    for worker in workers:
        worker.enrol()
    return workers


class Commits:
    """The write transactions of each thread, by its name's beginning, within `with`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.names: list[str] = []

    def _note(self, _: object) -> None:
        self.names.append(threading.current_thread().name)

    def __enter__(self) -> list[str]:
        event.listen(self._database.engine, "commit", self._note)
        return self.names

    def __exit__(self, *fault: object) -> None:
        event.remove(self._database.engine, "commit", self._note)


def test_a_small_update_is_stored_and_accepted_in_one_transaction(coordinator: LiveCoordinator) -> None:
    worker, _ = workers_of(coordinator, 2)
    start_run(coordinator.client(), MODEL, values(MODEL), cohort={"quorum": 2})
    task = worker.take()
    data, database = update_of(worker, task), coordinator.services.database
    with Commits(database) as commits, statements(database) as seen:
        submit(worker, task, data)
    assert len([name for name in commits if name.startswith("inspection")]) == 1
    assert len([statement for statement in seen if statement.startswith(("INSERT", "UPDATE"))]) <= 8
    assert coordinator.services.blobs.read(digest_of(data)) == data


def test_nothing_is_stored_of_a_rejected_small_update(coordinator: LiveCoordinator) -> None:
    (worker,) = workers_of(coordinator, 1)
    start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    with refusing("invalid-update"):
        submit(worker, task, update_of(worker, task, float("nan")))
    with refusing("invalid-update"):
        submit(worker, task, update_of(worker, task, float("nan")))
    with coordinator.services.database.snapshot() as session:
        assert {row.owner[:5] for row in session.query(UploadRow)} == {"token"}


def test_a_small_update_of_other_bytes_than_its_digest_is_refused_and_may_be_sent_again(
    coordinator: LiveCoordinator,
) -> None:
    (worker,) = workers_of(coordinator, 1)
    start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    data = update_of(worker, task)
    with refusing("digest-mismatch"):
        submit(worker, task, data, digest_of(b"other"))
    assert submit(worker, task, data).state == "accepted"
    assert submit(worker, task, data).upload_bytes == len(data)


def test_a_round_of_small_updates_is_closed_merged_and_followed_in_one_transaction(
    coordinator: LiveCoordinator,
) -> None:
    (worker,) = workers_of(coordinator, 1)
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), rounds=2)
    task, database = worker.take(), coordinator.services.database
    data = update_of(worker, task)
    with Commits(database) as commits:
        submit(worker, task, data)
        until(lambda: client.run(run.id).version.number == 1)
        coordinator.services.conductor.call()
        until(lambda: not coordinator.services.conductor._merging.locked())
    assert [name for name in commits if name == "merge"] == ["merge"]
    with database.snapshot() as session:
        of_run = session.query(AuditRow).filter(AuditRow.run_id == run.id).order_by(AuditRow.seq)
        actions = [row.action for row in of_run if row.action.startswith(("round", "version"))]
        states = [row.state for row in session.query(RoundRow).order_by(RoundRow.number)]
    assert actions == ["round.open", "round.close", "round.commit", "version", "round.open"]
    assert states == ["committed", "open"]
