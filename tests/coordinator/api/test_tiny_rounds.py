"""The cost of a round of a few kilobytes: transactions, statements, requests and bytes on the wire."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import AuditRow, RoundRow, TaskRow, UploadRow
from tessera.coordinator.db.tasks import is_waited_for
from tessera.shared.api.framing import MEDIA_TYPE, pack_submission
from tessera.shared.api.tasks import Submission, Task, TaskView
from tessera.shared.client.client import Client
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.support.coordinator import LiveCoordinator, refused, refusing, until
from tests.support.federation import _FETCHED, ScriptedWorker, small_model, start_run, values
from tests.support.storage import statements
from tests.support.tapping import Tap

pytestmark = pytest.mark.both_databases(long="postgresql")

MODEL = small_model()


def update_of(
    worker: ScriptedWorker, task: Task, model: Model = MODEL, *, step: float = 1.0, names: Sequence[str] = ()
) -> bytes:
    """An update that moves each value by `step`, of these blocks or of all."""
    file, base = io.BytesIO(), worker.fetch(task)
    moved = {name: ArrayTensor(base[name] + np.float32(step), "F32") for name in names or base}
    write_update(file, task.codec, [TrainedBlock(model.by_name[n], moved[n], ArrayTensor(base[n])) for n in moved])
    return file.getvalue()


def submit(worker: ScriptedWorker, task: Task, data: bytes, digest: str | None = None) -> TaskView:
    report = {"token": task.token, "version": task.version.digest, "data": data, "examples": 10}
    return worker.client.submit(task.id, Submission(update=digest or digest_of(data), **report))


def prompted(layers: int = 150) -> Model:
    """A model with enough small blocks that their digests, 32 bytes each, exceed 4 kB, and with 32 kB of prompts."""
    blocks = [
        Block(tensor=f"layer.{layer}.weight", role="mlp", layer=layer, shape=(4,), dtype="F32")
        for layer in range(layers)
    ]
    prompts = Block(tensor="prompts", role="prompt", layer=None, shape=(16, 512), dtype="F32")
    return Model(config={"model_type": "clip"}, head="contrastive", blocks=(*blocks, prompts))


def workers_of(coordinator: LiveCoordinator, count: int) -> list[ScriptedWorker]:
    return [ScriptedWorker(coordinator.client("site", f"s{number}")).enrol() for number in range(count)]


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


@pytest.mark.both_databases
def test_a_small_update_is_stored_and_accepted_in_one_transaction(coordinator: LiveCoordinator) -> None:
    worker, _ = workers_of(coordinator, 2)
    start_run(coordinator.client(), MODEL, values(MODEL), cohort={"quorum": 2})
    task = worker.take()
    data, database = update_of(worker, task), coordinator.services.database
    with Commits(database) as commits, statements(database) as seen:
        submit(worker, task, data)
    assert len([name for name in commits if name.startswith("inspection")]) == 1
    assert len([statement for statement in seen if statement.startswith(("INSERT", "UPDATE"))]) <= 10
    assert coordinator.services.blobs.read(digest_of(data)) == data


def test_nothing_is_stored_of_a_rejected_small_update(coordinator: LiveCoordinator) -> None:
    (worker,) = workers_of(coordinator, 1)
    start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    with refusing("invalid-update"):
        submit(worker, task, update_of(worker, task, step=float("nan")))
    with refusing("invalid-update"):
        submit(worker, task, update_of(worker, task, step=float("nan")))
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


@pytest.mark.both_databases
def test_a_round_closes_and_merges_and_the_next_opens_in_a_transaction_each(coordinator: LiveCoordinator) -> None:
    (worker,) = workers_of(coordinator, 1)
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), rounds=2)
    task, database = worker.take(), coordinator.services.database
    data = update_of(worker, task)
    with Commits(database) as commits:
        submit(worker, task, data)
        worker.take()
    # The thread of merges commits the version and nothing else.
    assert commits.count("merge") == 1
    with database.snapshot() as session:
        of_run = session.query(AuditRow).filter(AuditRow.run_id == run.id).order_by(AuditRow.seq)
        moves = [(row.action, row.at) for row in of_run if row.action.startswith(("round", "version"))]
        states = [row.state for row in session.query(RoundRow).order_by(RoundRow.number)]
    actions, instants = zip(*moves, strict=True)
    assert actions == ("round.open", "round.close", "round.commit", "version", "round.open")
    # One instant a transaction: of the end of a round and its version it is the same.
    assert len(set(instants)) == 4
    assert states == ["committed", "open"]


@pytest.mark.parametrize(
    ("cohort", "ends"),
    [({"quorum": 2}, "train"), ({"quorum": 1}, "fail"), ({"quorum": 1, "target_updates": 1}, "nothing")],
)
def test_a_round_closes_at_once_without_a_tick_whatever_the_last_worker_does(
    tmp_path: Path, cohort: dict[str, int], ends: str
) -> None:
    # Between ticks, the conductor looks only when a request wakes it.
    with LiveCoordinator(tmp_path, tick_seconds=600) as coordinator:
        first, last = workers_of(coordinator, 2)
        client = coordinator.client()
        run = start_run(client, MODEL, values(MODEL), rounds=1, cohort=cohort | {"size": 2})
        task, other = first.take(), last.take()
        submit(first, task, update_of(first, task))
        if ends == "train":
            submit(last, other, update_of(last, other))
        elif ends == "fail":
            last.fail(other)
        until(lambda: client.run(run.id).version.number == 1)


@pytest.mark.both_databases
@pytest.mark.parametrize("mode", ["barrier", "buffer"])
def test_an_update_wakes_the_conductor_unless_another_is_still_made(coordinator: LiveCoordinator, mode: str) -> None:
    first, last = workers_of(coordinator, 2)
    spec = start_run(coordinator.client(), MODEL, values(MODEL), cohort={"quorum": 2, "mode": mode}).spec
    task, other = first.take(), last.take()
    with coordinator.services.database.snapshot() as session:
        rows = [session.get_one(TaskRow, one.id) for one in (task, other)]
        assert [is_waited_for(session, row, spec) for row in rows] == [True, True]
    submit(first, task, update_of(first, task))
    with coordinator.services.database.snapshot() as session:
        rows = [session.get_one(TaskRow, one.id) for one in (task, other)]
        assert [is_waited_for(session, row, spec) for row in rows] == [True, False]
        enough = spec.model_copy(update={"cohort": spec.cohort.model_copy(update={"target_updates": 1})})
        assert not is_waited_for(session, rows[0], enough)


def test_a_round_of_prompts_moves_less_than_4_kb_beside_them(coordinator: LiveCoordinator) -> None:
    model, client = prompted(), coordinator.client()
    start_run(client, model, values(model), rounds=4)
    with Tap(coordinator.url) as tap, Client(tap.url, coordinator.token("site", "a"), verify=False) as site:
        worker, moved = ScriptedWorker(site), []
        for _ in range(4):
            up, down = len(tap.up), tap.down
            task = worker.take()
            # As a worker does with its cache.
            _FETCHED.update({digest_of(blob): blob for blob in task.inline_blobs})
            data = update_of(worker, task, model, names=["prompts"])
            submit(worker, task, data)
            beside = len(data) + (16 * 512 * 4 if task.inline_blobs else 0)
            moved.append((len(tap.up) - up + tap.down - down - beside, len(task.inline_blobs)))
    # The first round fetches the model. The prompts of each later version come with its task, and its manifest.
    assert [blobs for _, blobs in moved[1:]] == [2, 2, 2]
    assert all(nbytes < 4096 for nbytes, _ in moved[1:]), moved


def test_a_worker_of_json_alone_exchanges_base64(coordinator: LiveCoordinator) -> None:
    (worker,) = workers_of(coordinator, 1)
    start_run(coordinator.client(), MODEL, values(MODEL))
    claim = {"worker": "w", "instance": worker.instance, "datasets": {"data": 10}, "methods": ["fedavg"]}
    http = coordinator.http("site", "s0")
    answer = until(lambda: (found := http.post("/v1/tasks/claim", json=claim)).status_code == 200 and found)
    task = Task.model_validate_json(answer.content)
    assert answer.headers["Content-Type"] == "application/json"
    assert digest_of(task.inline_blobs[0]) == task.version.digest
    data = update_of(worker, task)
    about = {"token": task.token, "version": task.version.digest, "update": digest_of(data), "examples": 10}
    document = Submission.model_validate(about).model_copy(update={"data": data}).model_dump_json()
    path, headers = f"/v1/tasks/{task.id}/update", {"Content-Type": "application/json"}
    assert http.post(path, content=document, headers=headers).json()["state"] == "accepted"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{}", 400),
        (b"{}\n", 400),
        (b"{}\n[1]\n", 400),
        (b"{}\n[-1]\n", 400),
        (b"{}\n[true]\nx", 400),
        (b'{}\n{"a":1}\nx', 400),
        (b"\xff\n[]\n", 400),
        (b"{}\n[]\n", 422),
    ],
)
def test_a_body_that_is_no_document_with_blobs_is_refused(
    coordinator: LiveCoordinator, body: bytes, status: int
) -> None:
    http = coordinator.http("site", "a")
    answer = http.post("/v1/tasks/t/update", content=body, headers={"Content-Type": MEDIA_TYPE})
    refused(answer, status, "bad-request" if status == 400 else "invalid")


def test_a_submission_has_one_update(coordinator: LiveCoordinator) -> None:
    report = Submission(token=1, version=digest_of(b""), update=digest_of(b""), examples=1, data=b"x")
    document = report.model_dump_json().encode()
    http = coordinator.http("site", "a")
    for body in (document + b"\n[1]\nx", pack_submission(report).replace(b"[1]\nx", b"[1,1]\nxx")):
        answer = http.post("/v1/tasks/t/update", content=body, headers={"Content-Type": MEDIA_TYPE})
        assert "more than one update" in refused(answer, 400, "bad-request").detail
