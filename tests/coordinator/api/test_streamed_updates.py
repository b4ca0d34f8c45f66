"""An update that follows its submission is received like an upload, and judged like any other update."""

from __future__ import annotations

import io
import re
import socket
from pathlib import Path

import numpy as np
import pytest

from tessera.coordinator.db.tables import UploadRow
from tessera.shared.api.framing import MEDIA_TYPE, pack_submission
from tessera.shared.api.tasks import Submission, Task, TaskView
from tessera.shared.client.client import Client
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.support.coordinator import LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import connected, head, rest
from tests.support.tapping import Tap

SMALL, LARGE = small_model(width=80), small_model(width=300)
"""Of 206 kB, which is received in memory, and of 2.9 MB, which is staged."""


def taken(
    coordinator: LiveCoordinator, model: object = LARGE, client: Client | None = None
) -> tuple[ScriptedWorker, Task]:
    worker = ScriptedWorker(client or coordinator.client("site", "a")).enrol()
    start_run(coordinator.client(), model, values(model))
    return worker, worker.take()


def update_of(worker: ScriptedWorker, task: Task, step: float = 1.0) -> bytes:
    """The model's whole update, raw, so that its size is the model's."""
    file, base, model = io.BytesIO(), worker.fetch(task), worker.model_of(task)
    moved = {name: ArrayTensor(array + np.float32(step), "F32") for name, array in base.items()}
    write_update(file, "raw", [TrainedBlock(model.by_name[n], moved[n], ArrayTensor(base[n])) for n in moved])
    return file.getvalue()


def submission_of(task: Task, data: bytes) -> Submission:
    return Submission(token=task.token, version=task.version.digest, update=digest_of(data), examples=10)


def submit(worker: ScriptedWorker, task: Task, data: bytes, report: Submission | None = None) -> TaskView:
    report = report or submission_of(task, data)
    return worker.client.submit_file(task.id, report, io.BytesIO(data), len(data))


def request(coordinator: LiveCoordinator, task: Task, token: str, body: bytes, length: int) -> bytes:
    headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(length), "Authorization": f"Bearer {token}"}
    return head("POST", f"/v1/tasks/{task.id}/update", headers) + body


@pytest.mark.parametrize("model", [pytest.param(SMALL, marks=pytest.mark.long), LARGE], ids=["small", "large"])
def test_an_update_behind_its_submission_is_accepted_in_one_request_that_may_be_repeated(
    coordinator: LiveCoordinator, model: object
) -> None:
    with Tap(coordinator.url) as tap, Client(tap.url, coordinator.token("site", "a"), verify=False) as site:
        worker, task = taken(coordinator, model, site)
        data = update_of(worker, task)
        view = submit(worker, task, data)
        assert (view.state, view.upload_bytes) == ("accepted", len(data))
        assert submit(worker, task, data).update == view.update
        posted = re.findall(rb"(?:POST|PATCH) (/v1/\S+) HTTP", bytes(tap.up))
    assert [path for path in posted if path != b"/v1/tasks/claim"] == [f"/v1/tasks/{task.id}/update".encode()] * 2


def test_an_update_behind_its_submission_merges_like_one_that_was_uploaded(coordinator: LiveCoordinator) -> None:
    client, digests = coordinator.client(), []
    for streamed in (True, False):
        worker, task = taken(coordinator)
        data = update_of(worker, task)
        if not streamed:
            worker.client.put_bytes(data)
            worker.submit(task, digest_of(data))
        else:
            submit(worker, task, data)
        until(lambda run=task.run: client.run(run).state == "completed")
        digests.append(client.run(task.run).version.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["small", "large"])
def test_an_update_of_other_bytes_than_its_digest_is_refused_and_may_be_sent_again(
    coordinator: LiveCoordinator, model: object
) -> None:
    worker, task = taken(coordinator, model)
    data = update_of(worker, task)
    with refusing("digest-mismatch"):
        submit(worker, task, bytes(len(data)), submission_of(task, data))
    assert submit(worker, task, data).state == "accepted"


def test_an_invalid_update_behind_its_submission_is_rejected(coordinator: LiveCoordinator) -> None:
    worker, task = taken(coordinator)
    with refusing("invalid-update", "6 blocks"):
        submit(worker, task, update_of(worker, task, float("nan")))
    assert worker.client.task(task.id).state == "rejected"


def test_what_arrived_of_an_interrupted_update_is_not_sent_again(coordinator: LiveCoordinator) -> None:
    worker, task = taken(coordinator)
    data, token = update_of(worker, task), coordinator.token("site", "a")
    body = pack_submission(submission_of(task, data), len(data))
    with connected(coordinator) as raw:
        raw.sendall(request(coordinator, task, token, body + data[: len(data) // 2], len(body) + len(data)))
        raw.shutdown(socket.SHUT_WR)
        rest(raw)
    sent: list[int] = []
    report = submission_of(task, data)
    # The part is found once its connection has ended, and only the rest is sent.
    with coordinator.services.database.snapshot() as session:
        (row,) = [row for row in session.query(UploadRow) if row.digest == report.update]
    staged = coordinator.services.blobs.staging_dir / f"upload-{row.id}"
    # Uvicorn drops what it had read and not handed over yet.
    kept = len(data) // 2 - (1 << 19)
    until(lambda: staged.stat().st_size > kept)
    worker.client.put_stream(report.update, io.BytesIO(data), len(data), sent.append)
    assert len(data) // 2 <= sum(sent) < len(data) - kept
    assert worker.client.submit(task.id, report).state == "accepted"


@pytest.mark.parametrize("model", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["small", "large"])
@pytest.mark.parametrize(("more", "status", "code"), [(-1, 400, "bad-request"), (1, 413, "too-large")])
def test_more_or_fewer_bytes_than_announced_are_refused(
    coordinator: LiveCoordinator, model: object, more: int, status: int, code: str
) -> None:
    worker, task = taken(coordinator, model)
    data = update_of(worker, task)
    body = pack_submission(submission_of(task, data), len(data)) + (data + b"1")[: len(data) + more]
    http = coordinator.http("site", "a")
    answer = http.post(f"/v1/tasks/{task.id}/update", content=body, headers={"Content-Type": MEDIA_TYPE})
    refused(answer, status, code)
    assert submit(worker, task, data).state == "accepted"


def test_another_site_cannot_submit_and_what_it_sends_is_no_update(coordinator: LiveCoordinator) -> None:
    worker, task = taken(coordinator)
    data, other = update_of(worker, task), ScriptedWorker(coordinator.client("site", "b"))
    with refusing("not-found"):
        submit(other, task, data)
    with refusing("invalid", "was not uploaded"):
        worker.submit(task, digest_of(data))


def test_an_update_larger_than_the_limit_of_uploads_is_refused(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, max_upload_bytes=1 << 20) as coordinator:
        worker, task = taken(coordinator, SMALL)
        assert task.stream_bytes == 1 << 20
        with refusing("too-large", "max_upload_bytes"):
            submit(worker, task, bytes(2 << 20))
