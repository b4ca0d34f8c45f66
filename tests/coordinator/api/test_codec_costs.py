"""The costs that the coordinator reports for the choice of a codec, and the codecs that real workers choose."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.client.line import MEASURED_BYTES, ThreadTimes
from tessera.shared.model.spec import Model
from tessera.shared.schema import MAX_SECONDS_PER_BYTE
from tessera.shared.updates.codec_choice import decode_delay
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW
from tessera.shared.updates.safetensors_file import read_header
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.vault import Vault
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.coordinator.server.test_bulk_bodies import DATA, announce, offset, patch
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import connected, parsed
from tests.support.tasks import CPU, VIT, untrained
from tests.worker.simulation.test_simulation import images

LARGE = small_model(200)
"""1.3 MB, for which there is a choice."""

FAST = ThreadTimes(0, 0, 0)
SLOW = ThreadTimes(1e6, 0, 0)


def given(coordinator: LiveCoordinator, model: Model, workers: int = 1, **spec: Any) -> Task:
    """Return the task that the first worker of a round claims, by the number of its workers."""
    some = [ScriptedWorker(coordinator.client("site", f"s{number}")) for number in range(workers)]
    for worker in some:
        worker.enrol()
    start_run(coordinator.client(), model, values(model), cohort={"quorum": workers}, **spec)
    return some[0].take()


def test_a_worker_is_told_what_decoding_all_updates_of_its_round_costs(coordinator: LiveCoordinator) -> None:
    delay = given(coordinator, LARGE, 3).decode_seconds_per_byte
    assert delay is not None
    # At least that of one update, in three digits.
    assert decode_delay(LOSSLESS, 1, 1) * 0.99 <= delay < MAX_SECONDS_PER_BYTE


@pytest.mark.parametrize(
    ("model", "codec"),
    [(small_model(), LOSSLESS), (LARGE, RAW), pytest.param(LARGE, "delta+int8", marks=pytest.mark.long)],
    ids=["few bytes", "raw", "lossy"],
)
def test_a_worker_without_a_choice_is_told_nothing(coordinator: LiveCoordinator, model: Model, codec: str) -> None:
    assert given(coordinator, model, codec=codec).decode_seconds_per_byte is None


def test_a_report_that_cannot_be_is_no_report(coordinator: LiveCoordinator) -> None:
    document = given(coordinator, small_model()).model_dump(mode="json")
    for report in (-1, 2 * MAX_SECONDS_PER_BYTE, "NaN", "much", [], {}, 1e999):
        assert Task.model_validate({**document, "decode_seconds_per_byte": report}).decode_seconds_per_byte is None
    good = MAX_SECONDS_PER_BYTE / 2
    assert Task.model_validate({**document, "decode_seconds_per_byte": good}).decode_seconds_per_byte == good


def test_an_upload_is_answered_with_the_time_for_which_its_bytes_were_awaited(
    coordinator: LiveCoordinator,
) -> None:
    http = coordinator.http("orchestrator")
    location, half = announce(http), len(DATA) // 2
    with connected(coordinator) as raw:
        raw.sendall(patch(http, location, len(DATA)) + DATA[:half])
        until(lambda: offset(http, location) == half)
        time.sleep(0.05)
        raw.sendall(DATA[half:])
        waited = float(parsed(raw.recv(65536)).headers["Upload-Waited"])
    assert 0 < waited < 60


def test_an_upload_of_few_bytes_has_no_such_time(coordinator: LiveCoordinator) -> None:
    http = coordinator.http("orchestrator")
    location = announce(http, b"few")
    headers = {"Upload-Offset": "0", "Upload-Complete": "?1", "Content-Type": "application/partial-upload"}
    found = http.patch(location, headers=headers, content=b"few")
    assert found.status_code == 204
    assert "Upload-Waited" not in found.headers


# ---------------------------------------------------------------- real workers


WIDE = {**VIT, "hidden_size": 128, "intermediate_size": 768}


def real_worker(coordinator: LiveCoordinator, folder: Path, **spec: Any) -> tuple[TaskRunner, ScriptedWorker]:
    """A worker's runner in a run of one round of more than 1 MiB."""
    worker = ScriptedWorker(coordinator.client("site", "a"), datasets={"data": 16})
    cache, vault = Cache(folder / "cache", 1 << 24), Vault(folder / "vault")
    runner = TaskRunner(worker.client, {"data": images(0)}, TrainingSetup(CPU), vault, cache, folder)
    worker.enrol()
    document, start = untrained(WIDE, "image-classification")
    assert document.nbytes > MEASURED_BYTES
    training = Training(optimizer="sgd", momentum=0, learning_rate=0.01, batch_size=8)
    start_run(coordinator.client(), document, start, training=training, **spec)
    return runner, worker


def codecs_sent(coordinator: LiveCoordinator, runner: TaskRunner, worker: ScriptedWorker) -> set[str]:
    """The codecs of the update of the next task, as the coordinator holds it."""
    torch.set_num_threads(1)
    runner.run(worker.take(), lambda: None, Report())
    (digest,) = (view.update for view in worker.client.tasks() if view.update)
    data = coordinator.services.blobs.read(digest)
    return {value for name, value in read_header(io.BytesIO(data), len(data)).metadata.items() if name != "format"}


@pytest.mark.parametrize(("times", "expected"), [(FAST, {RAW}), (SLOW, {LOSSLESS, RAW})], ids=["fast", "slow"])
def test_a_worker_codes_its_update_on_a_slow_line_only(
    coordinator: LiveCoordinator, tmp_path: Path, times: ThreadTimes, expected: set[str]
) -> None:
    runner, worker = real_worker(coordinator, tmp_path)
    worker.client._transfers.up.note(MEASURED_BYTES, times)
    sent = codecs_sent(coordinator, runner, worker)
    assert sent <= expected
    assert (LOSSLESS in sent) is (times is SLOW)


def test_a_lossy_codec_is_no_matter_of_choice(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    runner, worker = real_worker(coordinator, tmp_path, codec="delta+int8")
    worker.client._transfers.up.note(MEASURED_BYTES, FAST)
    assert codecs_sent(coordinator, runner, worker) == {"delta+int8"}
