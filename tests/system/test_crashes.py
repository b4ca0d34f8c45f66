"""kill -9 of any process at any moment: no accepted update and no committed round is lost (invariant I5)."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunSpec, Training
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.spec import Lora
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.model_folder import ModelFolder
from tests.support import databases
from tests.support.coordinator import until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.histories import Finding, Log, RecordingClient, check, read
from tests.support.processes import CoordinatorProcess, Process, start_worker, worker_process
from tests.support.raw import PART, announced, connected, head
from tests.support.tasks import untrained
from tests.support.variants import variants

Keep = Callable[[Process], Process]


def shard(index: int) -> str:
    return f"""
[datasets.digits]
kind = "digits"
part = {{scheme = "dirichlet", count = 2, index = {index}, alpha = 0.5}}
"""


def digits_run(
    client: Client, vit: ModelFolder, rounds: int, codec: str = "bits+shuffle+zstd", **cohort: object
) -> Run:
    uploaded = upload_model(client, vit)
    return client.create_run(
        RunSpec(
            name="digits",
            method=MethodSpec(name="fedfrozen", settings={"warmup_rounds": 2, "scope": "v_head"}),
            model=uploaded.model,
            version=uploaded.version,
            dataset="digits",
            rounds=rounds,
            codec=codec,
            cohort=Cohort.model_validate({"size": 2, "quorum": 2, **cohort}),
            training=Training(learning_rate=1e-3),
        )
    )


def test_an_accepted_update_survives_the_coordinator(
    live: CoordinatorProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    client, model = live.admin(), small_model()
    logs = {site: Log(path=tmp_path / f"{site}.jsonl") for site in "ab"}
    start = values(model)
    run = start_run(client, model, start, cohort=Cohort(size=2, quorum=2))
    first, second = (
        ScriptedWorker(RecordingClient(live.url, live.site_token(site), log, f"{site}/w", patience_seconds=30))
        for site, log in logs.items()
    )
    for worker in (first, second):
        request.addfinalizer(worker.client.close)
    first.enrol()
    second.enrol()
    first.train(first.take(), step=1.0)
    task = second.take()

    live.kill()
    live.start()

    second.train(task, step=3.0)
    until(lambda: client.run(run.id).state == "completed")
    file = io.BytesIO()
    client.export(run.id, file)
    # Both count: (1 + 3) / 2 = 2
    np.testing.assert_allclose(load(file.getvalue())["head.weight"], start["head.weight"] + 2.0, rtol=1e-6)
    assert findings(live, read(log.path for log in logs.values() if log.path)) == []


def test_the_bytes_of_a_large_upload_that_arrived_survive_the_coordinator(live: CoordinatorProcess) -> None:
    data, admin = bytes(range(256)) * 65_536, live.admin()  # 16 MiB
    token = (live.folder / "admin.token").read_text().strip()
    with httpx.Client(base_url=live.url, headers={"Authorization": f"Bearer {token}"}) as http:
        location = http.post("/v1/uploads", headers=announced(data)).headers["Location"]

        def offset() -> int:
            return int(http.head(location).headers["Upload-Offset"])

        part = {**PART, "Upload-Offset": "0", "Content-Length": str(len(data))}
        with connected(live) as raw:
            raw.sendall(
                head("PATCH", location, {**part, "Authorization": f"Bearer {token}"}) + data[: len(data) // 2]
            )
            arrived = until(offset)
            live.kill()
        live.start()
        assert arrived <= offset() <= len(data) // 2

    sent: list[int] = []
    admin.put_stream(digest_of(data), io.BytesIO(data), len(data), sent.append)
    assert sum(sent) <= len(data) - arrived
    assert admin.read_blob(digest_of(data)) == data


def findings(coordinator: CoordinatorProcess, lines: list[dict[str, Any]]) -> list[Finding]:
    """What is wrong with the histories, or with what the coordinator left on its disk."""
    folder = coordinator.folder
    database = Database(databases.url_in(folder))
    try:
        return check(lines, database, Blobs(database, str(folder / "blobs"), folder / "eyes", 65_536, 1 << 18))
    finally:
        database.close()


def final_version(folder: Path, vit: ModelFolder, running: Keep, *, disturbed: bool) -> str:
    """The digest of a run's last version after four rounds by two real workers."""
    with CoordinatorProcess(folder, lease_seconds=3) as coordinator:
        workers = [running(worker_process(coordinator, site, shard(i))) for i, site in enumerate("ab")]
        client = coordinator.admin()
        run = digits_run(client, vit, rounds=4)
        if disturbed:
            disturb(coordinator, client, run, workers, running)
        until(lambda: ended(client, run), seconds=100)
        for worker in workers:
            worker.kill()
        # Real workers keep no history, but each version must be the merge of what its round accepted.
        assert findings(coordinator, []) == []
        return client.run(run.id).version.digest


def ended(client: Client, run: Run) -> bool:
    state = client.run(run.id).state
    assert state in ("running", "completed"), client.run(run.id).reason
    return state == "completed"


def disturb(coordinator: CoordinatorProcess, client: Client, run: Run, workers: list[Process], running: Keep) -> None:
    """Kills the coordinator in round 1, pauses and resumes after it, kills a worker in a later round."""

    def tasks(state: str) -> int:
        return sum(task.state == state for round_ in client.rounds(run.id) for task in round_.tasks)

    until(lambda: tasks("leased") >= 1, seconds=60)
    coordinator.kill()
    coordinator.start()
    client.set_run_state(run.id, "paused")
    until(lambda: not any(r.state in ("open", "merging") for r in client.rounds(run.id)), seconds=60)
    client.set_run_state(run.id, "running")
    until(lambda: tasks("leased") >= 1, seconds=60)
    workers[0].kill()
    workers[0] = running(start_worker(coordinator.folder / "a"))


def adapted_version(folder: Path, average: str, *, killed: bool) -> dict[str, str]:
    """The blocks of a LoRA run's last version after two rounds of sites of two ranks, by digest. With `killed`, the
    coordinator is killed as soon as the last update of each round was accepted, while it merges."""
    lora = Lora(rank=4, alpha=8, ranks=(2, 4))
    config = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes = {"intermediate_size": 64, "vocab_size": 20, "num_labels": 2}
    model, start = untrained({**config, **sizes}, "text-classification", seed=1, lora=lora)
    with CoordinatorProcess(folder, lease_seconds=3) as coordinator:
        client = coordinator.admin()
        method = MethodSpec(name="lora", settings={"average": average})
        cohort = Cohort(size=2, quorum=2)
        run = start_run(client, model, start, rounds=2, method=method, cohort=cohort, lora_ranks={"a": 2})
        workers = [
            ScriptedWorker(
                Client(coordinator.url, coordinator.site_token(site), patience_seconds=30), methods=("lora",)
            )
            for site in "ab"
        ]
        for worker in workers:
            worker.enrol()
        for _ in range(2):
            for step, worker in enumerate(workers, 1):
                worker.train(worker.take(), step=float(step))
            if killed:
                coordinator.kill()
                coordinator.start()
        until(lambda: ended(client, run))
        for worker in workers:
            worker.client.close()
        assert findings(coordinator, []) == []
        return dict(client.manifest(client.run(run.id).version.digest).blocks)


@pytest.mark.parametrize("average", variants(["partition", "stack", "residual"], {"residual"}))
def test_a_version_whose_base_changes_is_the_same_if_its_merge_was_killed(tmp_path: Path, average: str) -> None:
    undisturbed = adapted_version(tmp_path / "one", average, killed=False)
    assert adapted_version(tmp_path / "two", average, killed=True) == undisturbed


# In short, tests/chaos shows the same of every process.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_was_killed_and_paused_is_bit_identical_to_one_that_was_not(
    tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    undisturbed = final_version(tmp_path / "one", vit, running, disturbed=False)
    disturbed = final_version(tmp_path / "two", vit, running, disturbed=True)
    assert disturbed == undisturbed


# In short, the model checking of buffered runs, and tests/coordinator/api/test_buffer.py.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_buffers_updates_survives_its_coordinator_and_a_worker(
    tmp_path: Path, vit: ModelFolder, running: Keep
) -> None:
    with CoordinatorProcess(tmp_path / "coordinator", lease_seconds=3) as coordinator:
        workers = [running(worker_process(coordinator, site, shard(i))) for i, site in enumerate("ab")]
        client = coordinator.admin()
        about = {"mode": "buffer", "quorum": 1, "target_updates": 1, "max_staleness": 3}
        run = digits_run(client, vit, 6, "delta+int8+zstd", **about)
        disturb(coordinator, client, run, workers, running)
        until(lambda: ended(client, run), seconds=200)
        for worker in workers:
            worker.kill()
        assert findings(coordinator, []) == []
        tasks = [task for round_ in client.rounds(run.id) for task in round_.tasks]
        # Both sites count, though each version takes one update.
        assert {task.worker.partition("/")[0] for task in tasks if task.state == "merged"} == {"a", "b"}


@pytest.mark.parametrize(
    "asks",
    [
        pytest.param({"evaluation": {"sites": True}}, id="measured"),
        pytest.param({"rehearsal": 5}, marks=pytest.mark.long, id="rehearsed"),
        pytest.param({"membership_attack": True}, marks=pytest.mark.long, id="attacked"),
    ],
)
def test_a_run_without_rounds_survives_its_coordinator_and_a_worker(
    tmp_path: Path, vit: ModelFolder, running: Keep, asks: dict[str, Any]
) -> None:
    with CoordinatorProcess(tmp_path / "killed", lease_seconds=3) as coordinator:
        client = coordinator.admin()
        uploaded = upload_model(client, vit)
        asked = {"rounds": 0, "dataset": "digits", **asks, "cohort": {"sites": ["a", "b"]}}
        digests = {"model": uploaded.model, "version": uploaded.version}
        workers = [running(worker_process(coordinator, s, f"{shard(i)}held_out = 0.3")) for i, s in enumerate("ab")]
        if "membership_attack" in asks:
            # Otherwise the sites have no members.
            trained = digits_run(client, vit, rounds=3)
            until(lambda: ended(client, trained), seconds=100)
        run = client.create_run(RunSpec.model_validate({"name": "measured", **asked, **digests}))
        until(lambda: workers[0].said("started"), seconds=60)
        workers[0].kill()
        coordinator.kill()
        coordinator.start()
        running(start_worker(coordinator.folder / "a"))
        until(lambda: ended(client, run), seconds=100)
        reports = client.reports(run.id)
        assert [(one.site, one.state) for one in reports] == [("a", "accepted"), ("b", "accepted")]
        if "evaluation" not in asks:
            assert all(one.rehearsal or one.membership for one in reports)
        else:
            assert sorted(one.site for one in client.measurements(run.id)) == ["a", "b"]
        assert findings(coordinator, []) == []


def test_a_worker_that_is_told_to_stop_gives_its_task_back_at_once(
    live: CoordinatorProcess, vit: ModelFolder, running: Keep
) -> None:
    client = live.admin()
    worker = running(worker_process(live, "a", shard(0)))
    uploaded = upload_model(client, vit)
    spec = RunSpec(
        name="long",
        method=MethodSpec(name="fedavg"),
        model=uploaded.model,
        version=uploaded.version,
        dataset="digits",
        rounds=1,
        cohort=Cohort(size=1),
        training=Training(epochs=100, batch_size=1),
    )
    run = client.create_run(spec)
    until(lambda: any(t.state == "leased" for r in client.rounds(run.id) for t in r.tasks), seconds=60)

    assert worker.terminate() == 0
    (round_,) = client.rounds(run.id)
    assert [task.state for task in round_.tasks] == ["offered"]
