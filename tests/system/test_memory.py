"""Memory is bounded by a few chunks per update, not by clients times model (invariant I11)."""

from __future__ import annotations

import io
import json
import os
from contextlib import ExitStack

import httpx
import numpy as np
import pytest

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import BlobRow, RunBlobRow
from tessera.shared.aggregation.robust import Mean, Median, RobustRule
from tessera.shared.aggregation.server_optimizer import Adam, NoOptimizer, OptimizerRule
from tessera.shared.api.cohort import Cohort
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.support.coordinator import until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.processes import CoordinatorProcess, peak_bytes
from tests.support.raw import connected, head

MIB = 1 << 20
SMALL_BYTES = 1 << 16
UPDATE_BYTES = 50_000_000


@pytest.mark.parametrize(
    ("optimizer", "robust", "moved"),
    [
        # (0 + 1 + ... + 7) / 8 = 3.5
        pytest.param(NoOptimizer(), Mean(), 3.5, marks=pytest.mark.long),
        # m = 0.1 * 3.5 and v = 0.99 * 1e-6 + 0.01 * 3.5^2 = 0.122501; 0.1 * 0.35 / (0.3500014 + 0.001) = 0.0997147
        (Adam(learning_rate=0.1), Mean(), 0.0997147),
        # Halfway between 3 and 4.
        pytest.param(NoOptimizer(), Median(), 3.5, marks=pytest.mark.long),
    ],
    ids=["mean", "adam", "median"],
)
def test_merging_eight_updates_of_50_mb_takes_under_300_mib(
    live: CoordinatorProcess, optimizer: OptimizerRule, robust: RobustRule, moved: float
) -> None:
    # One block of the whole size, which is the worst case.
    block = Block(tensor="weight", role="mlp", layer=0, shape=(UPDATE_BYTES // 4,), dtype="F32")
    model = Model(config={"model_type": "bert"}, head="features", blocks=(block,))
    start = np.zeros(block.shape, np.float32)
    client = live.admin()
    cohort = Cohort(size=8, quorum=8)
    run = start_run(
        client, model, {"weight": start}, cohort=cohort, codec="raw", server_optimizer=optimizer, robust=robust
    )
    workers = [ScriptedWorker(live.site(f"s{index}")).enrol() for index in range(8)]

    for index, worker in enumerate(workers):
        task = worker.take()
        file = io.BytesIO()
        value = ArrayTensor(np.full(block.shape, index, np.float32))
        write_update(file, "raw", [TrainedBlock(block, value, ArrayTensor(start))])
        assert file.getbuffer().nbytes >= UPDATE_BYTES
        worker.submit(task, worker.client.put_bytes(file.getvalue()))

    until(lambda: client.run(run.id).state == "completed", seconds=300)
    digest = client.manifest(client.run(run.id).version.digest).blocks["weight"]
    merged = np.frombuffer(client.read_blob(digest, max_bytes=UPDATE_BYTES), "<f4")
    np.testing.assert_allclose(merged, moved, rtol=1e-6)
    peaks = [peak_bytes(pid) for pid in (live.process.pid, live.conductor().pid)]
    print(f"peak memory, serving and conducting: {[peak // MIB for peak in peaks]} MiB, on {os.cpu_count()} cores")
    assert max(peaks) < 300 * MIB


@pytest.mark.parametrize(
    ("count", "readers"), [(512, 8), pytest.param(4096, 8, marks=pytest.mark.long)], ids=["few", "all"]
)
def test_answers_with_small_blobs_that_nobody_takes_are_not_held_in_memory(
    live: CoordinatorProcess, count: int, readers: int
) -> None:
    client, model = live.admin(), small_model()
    run = start_run(client, model, values(model))
    digests = []
    database = Database(live.environment["TESSERA_DATABASE_URL"])
    with database.transaction() as session:
        for number in range(count):
            data = number.to_bytes(8) * (SMALL_BYTES // 8)
            digests.append(digest_of(data))
            session.add(BlobRow(digest=digests[-1], size=len(data), inline=data, created_at=0.0))
            session.flush()
            session.expunge_all()
            session.add(RunBlobRow(run_id=run.id, digest=digests[-1]))
    database.close()
    token = (live.folder / "admin.token").read_text().strip()
    body = json.dumps({"digests": digests}).encode()
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    # Hashed, once.
    assert httpx.post(f"{live.url}/v1/blobs/read", headers=headers, content=body, timeout=60).is_success
    before = peak_bytes(live.process.pid)
    with ExitStack() as open_:
        for _ in range(readers):
            raw = open_.enter_context(connected(live, receive_bytes=4096))
            raw.sendall(head("POST", "/v1/blobs/read", headers) + body)
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
        assert httpx.get(f"{live.url}/healthz/live").is_success
        grown = peak_bytes(live.process.pid) - before
    # Together they ask for 256 MiB, and for 2 GiB.
    print(f"{readers} answers of {count} small blobs: {grown / MIB:.1f} MiB more at the peak")
    assert grown < 64 * MIB
