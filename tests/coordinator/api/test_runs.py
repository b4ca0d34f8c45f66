"""Runs: what may start one, how one is steered, and what comes out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.tasks import Failure
from tessera.shared.api.versions import Manifest, ServerTensor
from tessera.shared.client.export import export_folder
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.preprocessing import FileRef
from tessera.shared.model.spec import Model
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import as_bytes
from tests.support.coordinator import LiveCoordinator, refused, refusing, until
from tests.support.federation import HOLDING, ScriptedWorker, exported, small_model, start_run, values

MODEL = small_model()
START = values(MODEL)
MISSING = f"sha256:{'9' * 64}"

# ---------------------------------------------------------------- starting


@pytest.fixture(scope="module")
def spec(standing: LiveCoordinator) -> dict[str, Any]:
    """A run that can be started, for tests to spoil."""
    run = start_run(standing.client(), MODEL, START, dataset="nobody-has-it")
    return run.spec.model_dump(mode="json")


@pytest.mark.parametrize(
    ("change", "pointers", "says"),
    [
        ({"method": {"name": "fedavgg"}}, ["/method/name"], "did you mean `fedavg`?"),
        ({"method": {"name": "fedavg", "settings": {"mu": 1}}}, ["/method/settings/mu"], "unknown key"),
        (
            {"method": {"name": "fedfrozen", "settings": {"warmup_rounds": -1, "scope": "x"}}},
            ["/method/settings/scope", "/method/settings/warmup_rounds"],
            "",
        ),
        ({"model": MISSING}, ["/model"], "was not uploaded"),
        ({"version": MISSING}, ["/version"], "was not uploaded"),
        ({"codec": "gzip"}, ["/codec"], "unknown stages"),
        ({"codec": "zstd+delta"}, ["/codec"], "comes first"),
        ({"cohort": {"size": 2, "quorum": 3}}, ["/cohort"], "a quorum of 3 cannot come from a cohort of 2"),
        ({"normalization": "whim"}, ["/normalization"], ""),
        ({"server_optimizer": {"kind": "sgd", "tau": 1}}, ["/server_optimizer/tau"], "unknown key"),
        ({"method": {"name": "scaffold"}}, ["/method"], "set training.optimizer to 'sgd'"),
    ],
)
def test_a_spec_s_faults_are_named_by_pointer(
    standing: LiveCoordinator, spec: dict[str, Any], change: dict[str, Any], pointers: list[str], says: str
) -> None:
    document = refused(standing.http().post("/v1/runs", json=spec | change), 422, "invalid")
    assert sorted(fault.pointer for fault in document.errors) == pointers
    assert says in " ".join(fault.detail for fault in document.errors)
    assert document.detail not in [fault.detail for fault in document.errors]


def test_a_first_version_must_fit_the_model_block_by_block(standing: LiveCoordinator, spec: dict[str, Any]) -> None:
    client = standing.client()
    blocks = dict(client.manifest(spec["version"]).blocks)
    del blocks["layer.0.mlp.weight"]
    blocks["layer.0.output.weight"] = MISSING
    blocks["head.weight"] = client.put_bytes(b"too short")
    blocks["stranger"] = blocks["head.weight"]
    version = client.put_bytes(canonical(Manifest(blocks=blocks)))
    document = refused(standing.http().post("/v1/runs", json=spec | {"version": version}), 422, "invalid")
    assert {fault.pointer.removeprefix("/version/blocks/"): fault.detail for fault in document.errors} == {
        "layer.0.mlp.weight": "this block of the model is missing",
        "layer.0.output.weight": f"blob {MISSING} was not uploaded",
        "head.weight": f"blob {blocks['head.weight']} has 9 bytes; 32 are needed",
        "stranger": "the model has no such block",
    }


@pytest.mark.parametrize("document", [b"", b"not json", b"[]", b'{"config": {}}', b'{"blocks": "x"}'])
def test_a_model_that_is_none_is_refused(standing: LiveCoordinator, spec: dict[str, Any], document: bytes) -> None:
    digest = standing.client().put_bytes(document)
    answer = standing.http().post("/v1/runs", json=spec | {"model": digest})
    assert all(fault.pointer.startswith("/model") for fault in refused(answer, 422, "invalid").errors)


def test_a_table_of_blocks_that_covers_a_tensor_twice_is_refused(
    standing: LiveCoordinator, spec: dict[str, Any]
) -> None:
    client = standing.client()
    document = json.loads(client.read_blob(spec["model"]))
    document["blocks"].append(document["blocks"][-1])
    digest = client.put_bytes(json.dumps(document).encode())
    answer = standing.http().post("/v1/runs", json=spec | {"model": digest})
    assert "head.weight: listed both whole and in parts, or twice" in answer.text
    refused(answer, 422, "invalid")


@pytest.mark.parametrize(
    ("method", "lacking", "selected"),
    [
        # A language model whose output matrix is tied to its embeddings has no head.
        ("fedper", {"head"}, "{'roles': ['head']}"),
        ("fedrep", {"head"}, "{'roles': ['head']}"),
        ("fedbabu", {"head"}, "{'roles': ['head']}"),
        ({"name": "fedper", "settings": {"private": [{"names": ["haed.*"]}]}}, set(), "{'names': ['haed.*']}"),
        # Only the second stage selects these.
        ("fedfrozen", {"query", "key", "value"}, "{'roles': ['query', 'key']}"),
        ({"name": "fedfrozen", "settings": {"scope": "v_only"}}, {"value"}, "{'roles': ['value']}"),
    ],
)
def test_a_method_that_selects_blocks_which_the_model_lacks_is_refused(
    standing: LiveCoordinator, spec: dict[str, Any], method: Any, lacking: set[str], selected: str
) -> None:
    client = standing.client()
    model = MODEL.model_copy(update={"blocks": tuple(block for block in MODEL.blocks if block.role not in lacking)})
    blocks = client.manifest(spec["version"]).blocks
    version = client.put_bytes(canonical(Manifest(blocks={name: blocks[name] for name in model.by_name})))
    change = {
        "model": client.put_bytes(canonical(model)),
        "version": version,
        "method": {"name": method} if isinstance(method, str) else method,
    }
    for route in ("/v1/runs", "/v1/runs/preview"):
        (fault,) = refused(standing.http().post(route, json=spec | change), 422, "invalid").errors
        assert fault.pointer == "/method"
        assert f"no block matches {selected}" in fault.detail
        assert fault.detail.endswith("name blocks of the model in method.settings, or choose another method")


# ---------------------------------------------------------------- steering


def patch(http: httpx.Client, run_id: str, state: str, etag: str | None) -> httpx.Response:
    return http.patch(f"/v1/runs/{run_id}", json={"state": state}, headers={"If-Match": etag} if etag else {})


def test_a_change_needs_the_present_etag(coordinator: LiveCoordinator) -> None:
    http, run = coordinator.http(), start_run(coordinator.client(), MODEL, START)
    first = http.get(f"/v1/runs/{run.id}").headers["ETag"]
    refused(patch(http, run.id, "paused", None), 428, "precondition-required")
    refused(patch(http, run.id, "paused", '"999"'), 412, "precondition-failed")
    paused = patch(http, run.id, "paused", first)
    assert (paused.status_code, paused.json()["state"]) == (200, "paused")
    assert paused.headers["ETag"] not in (first, None)
    refused(patch(http, run.id, "cancelled", first), 412, "precondition-failed")
    assert patch(http, run.id, "running", paused.headers["ETag"]).json()["state"] == "running"


def test_a_run_that_has_ended_stays_as_it_is(coordinator: LiveCoordinator) -> None:
    client, http, run = coordinator.client(), coordinator.http(), start_run(coordinator.client(), MODEL, START)
    client.set_run_state(run.id, "cancelled")
    for state in ("running", "paused"):
        etag = http.get(f"/v1/runs/{run.id}").headers["ETag"]
        refused(patch(http, run.id, state, etag), 409, "conflict")
    assert client.run(run.id).state == "cancelled"


def test_asking_again_for_the_state_that_a_run_has_is_answered_with_the_run(coordinator: LiveCoordinator) -> None:
    client, http, run = coordinator.client(), coordinator.http(), start_run(coordinator.client(), MODEL, START)
    etag = http.get(f"/v1/runs/{run.id}").headers["ETag"]
    first = patch(http, run.id, "paused", etag)
    again = patch(http, run.id, "paused", etag)
    assert (again.status_code, again.json(), again.headers["ETag"]) == (200, first.json(), first.headers["ETag"])
    assert client.run(run.id).revision == run.revision + 1


def test_an_orchestrator_cannot_make_a_run_of_what_a_site_sent(coordinator: LiveCoordinator) -> None:
    client, site = coordinator.client("orchestrator"), coordinator.client("site", "a")
    private = site.put_bytes(bytes(as_bytes(START["head.weight"] + 1)))
    blocks = dict(zip(START, HOLDING[client](bytes(as_bytes(array)) for array in START.values()), strict=True))
    stolen = client.put_bytes(canonical(Manifest(blocks={**blocks, "head.weight": private})))
    document = client.put_bytes(canonical(MODEL))
    spec = RunSpec(
        name="x", method=MethodSpec(name="fedavg"), model=document, version=stolen, dataset="data", rounds=1
    )
    with refusing("invalid") as caught:
        client.create_run(spec)
    assert [fault.pointer for fault in caught.value.errors] == ["/version/blocks/head.weight"]
    ref = FileRef(digest=private, nbytes=START["head.weight"].nbytes)
    with refusing("invalid") as caught:
        start_run(client, MODEL.model_copy(update={"preprocessing": {"tokenizer.json": ref}}), START)
    assert [fault.pointer for fault in caught.value.errors] == ["/model/preprocessing/tokenizer.json"]
    assert not client.has_blob(private)


def test_a_tokenizer_of_the_model_is_exported_and_its_settings_are_checked(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client("orchestrator")

    def model(name: str, raw: bytes) -> Model:
        ref = FileRef(digest=client.put_bytes(raw), nbytes=len(raw))
        return MODEL.model_copy(update={"preprocessing": {name: ref}})

    run = start_run(client, model("tokenizer.json", b'{"model": {}}'), START)
    export_folder(client, run, tmp_path / "out", 0, lambda _: None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"model": {}}'
    with refusing("invalid") as caught:
        start_run(client, model("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": "evil.py"}}'), START)
    assert "do not travel" in str(caught.value)


def test_a_first_version_s_memory_must_be_there_and_fit(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    blocks = dict(zip(START, HOLDING[client](bytes(as_bytes(array)) for array in START.values()), strict=True))
    small = ServerTensor(digest=client.put_bytes(b"four"), shape=(2,), dtype="F32")
    version = client.put_bytes(canonical(Manifest(blocks=blocks, server_state={"m": small})))
    document = client.put_bytes(canonical(MODEL))
    spec = RunSpec(
        name="x", method=MethodSpec(name="fedavg"), model=document, version=version, dataset="data", rounds=1
    )
    with refusing("invalid") as caught:
        client.create_run(spec)
    assert [(f.pointer, "4 bytes; 8" in f.detail) for f in caught.value.errors] == [("/version/server_state/m", True)]


@pytest.mark.parametrize("state", ["completed", "merging", "open", ""])
def test_only_three_states_may_be_asked_for(standing: LiveCoordinator, spec: dict[str, Any], state: str) -> None:
    refused(patch(standing.http(), "x", state, '"1"'), 422, "invalid")


def test_a_pause_lets_the_open_round_finish_and_opens_no_other(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = ScriptedWorker(coordinator.client("site", "a"))
    run = start_run(client, MODEL, START, rounds=2)
    task = worker.take()
    client.set_run_state(run.id, "paused")
    worker.client.heartbeat(task.id, task.token)
    worker.train(task)
    until(lambda: client.run(run.id).version.number == 1)
    assert worker.claim(1) is None
    assert [r.state for r in client.rounds(run.id)] == ["committed"]
    client.set_run_state(run.id, "running")
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")


def test_a_cancelled_run_tells_its_workers_to_drop_the_work(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    worker = ScriptedWorker(coordinator.client("site", "a"))
    run = start_run(client, MODEL, START)
    task = worker.take()
    client.set_run_state(run.id, "cancelled")
    until(lambda: client.task(task.id).state == "cancelled")
    with refusing("task-cancelled"):
        worker.client.heartbeat(task.id, task.token)
    with refusing("task-cancelled"):
        worker.train(task)
    assert client.round(run.id, 1).reason == "the run was cancelled"
    assert worker.claim(0) is None


# ---------------------------------------------------------------- what comes out


def merged(coordinator: LiveCoordinator, normalization: str) -> dict[str, np.ndarray]:
    """Two workers, of whom only the second sends the MLP."""
    client = coordinator.client()
    workers = [
        ScriptedWorker(coordinator.client("site", s), datasets={"data": n}).enrol() for s, n in (("a", 10), ("b", 30))
    ]
    run = start_run(client, MODEL, START, normalization=normalization, cohort=Cohort(size=2, quorum=2))
    for worker, names in zip(workers, (["head.weight"], ["head.weight", "layer.0.mlp.weight"]), strict=True):
        task = worker.take()
        worker.submit(task, worker.upload(task, {name: START[name] + np.float32(2) for name in names}))
    until(lambda: client.run(run.id).state == "completed")
    return exported(client, run)


def test_divided_by_the_participants_a_rare_block_moves_in_full(coordinator: LiveCoordinator) -> None:
    tensors = merged(coordinator, "participants")
    np.testing.assert_allclose(tensors["head.weight"], START["head.weight"] + 2, rtol=1e-6)
    # 30 * 2 / 30 = 2
    np.testing.assert_allclose(tensors["layer.0.mlp.weight"], START["layer.0.mlp.weight"] + 2, rtol=1e-6)


def test_divided_by_the_cohort_it_is_damped_by_the_share_that_sent(coordinator: LiveCoordinator) -> None:
    tensors = merged(coordinator, "cohort")
    np.testing.assert_allclose(tensors["head.weight"], START["head.weight"] + 2, rtol=1e-6)
    # 30 * 2 / (10 + 30) = 1.5
    np.testing.assert_allclose(tensors["layer.0.mlp.weight"], START["layer.0.mlp.weight"] + 1.5, rtol=1e-6)
    np.testing.assert_array_equal(tensors["layer.0.output.weight"], START["layer.0.output.weight"])


def test_an_export_is_every_block_in_its_place_bit_for_bit(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = start_run(client, MODEL, START)
    sizes: list[int] = []
    file = io.BytesIO()
    client.export(run.id, file, number=0, progress=sizes.append)
    tensors = load(file.getvalue())
    assert sum(sizes) == len(file.getvalue())
    assert set(tensors) == {block.tensor for block in MODEL.blocks}
    for block in MODEL.blocks:
        whole = tensors[block.tensor]
        part = whole if block.part is None else whole.take(block.part.index(), axis=block.part.axis)
        assert part.tobytes() == START[block.name].tobytes(), block.name


def test_a_version_that_there_is_not_is_told_with_the_latest(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    run = start_run(client, MODEL, START)
    with refusing("not-found", "the latest is 0"):
        client.export(run.id, io.BytesIO(), number=1)
    with refusing("not-found", "has no round 1"):
        client.round(run.id, 1)


def test_a_round_shows_what_each_worker_did(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    good, bad = (ScriptedWorker(coordinator.client("site", site)).enrol() for site in "ab")
    run = start_run(client, MODEL, START, cohort=Cohort(size=2))
    good.train(good.take())
    task = bad.take()
    bad.client.fail(task.id, Failure(token=task.token, code="no-data", detail="the disk is away"))
    until(lambda: client.run(run.id).state == "completed")
    shown = client.round(run.id, 1)
    assert (shown.state, shown.version, shown.attempt, shown.reason) == ("committed", 1, 1, "all tasks ended")
    assert [(t.worker, t.state, t.examples) for t in shown.tasks] == [
        ("a/w", "merged", 10),
        ("b/w", "failed", None),
    ]
    assert shown.tasks[0].upload_bytes > 0
