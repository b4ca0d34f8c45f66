"""The memory of a coordinator's processes, as its operator could read it, has no plain update of a secure sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_file

from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.client.client import Client
from tessera.shared.client.model_upload import upload_model
from tessera.shared.methods.base import Participant, Plan, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Model
from tessera.shared.rounds.client_privacy import EPSILON
from tessera.shared.rounds.planning import plans_of, run_facts, task_of, training_seed
from tessera.shared.rounds.secure_sums import Precision, ring_blocks
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.codecs.delta import difference
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.blob_folder import Folder
from tessera.simulation.virtual_sites import SharedDiskCache
from tessera.worker.data.registry import load as load_data
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.executor.stages.load import load
from tessera.worker.executor.stages.train import train
from tessera.worker.state.hash_chain import TaskRef, derived
from tessera.worker.state.vault import Vault
from tessera.worker.task.environment import TRAINING_SEEDS, Journal, TaskEnvironment, TaskRun
from tessera.worker.task.fetch import fetch
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, audit_key, memory_of
from tests.support.secure_sums import Federation, integers_of
from tests.system.test_secure_sums import SITES, WEIGHTS, Keep, begun, settings, started

Arrays = Mapping[str, np.ndarray]
TRACE = 16
"""Values in a row that tell an update from all else."""

pytestmark = pytest.mark.long


def found_in(coordinator: CoordinatorProcess, traces: Collection[bytes]) -> set[bytes]:
    """Those of the traces that are in the memory of a process of the coordinator now."""
    left = set(traces)
    for pid in coordinator.pids():
        for memory in memory_of(pid):
            left -= {trace for trace in left if trace in memory}
    return set(traces) - left


def traces_of(values: np.ndarray, places: int) -> set[bytes]:
    """The bytes of some values at a number of places in a block."""
    flat = np.ascontiguousarray(values).ravel()
    starts = [flat.size * (2 * place + 1) // (2 * places) for place in range(places)]
    rows = [flat[start : start + TRACE] for start in starts]
    assert all(len(np.unique(row)) > TRACE // 2 for row in rows), "too few different values to be told from others"
    return {row.tobytes() for row in rows}


def updates_of(coordinator: CoordinatorProcess, run: Run) -> dict[str, Arrays]:
    """The new values of each block that each site sent in the first round of a run without codec, from the disk: what
    is read over HTTP passes through the memory that is searched."""
    (first,) = coordinator.admin().rounds(run.id)
    files = {path.name: path for path in (coordinator.folder / "blobs").rglob("*") if path.is_file()}
    digests = {task.worker.split("/")[0]: (task.update or "").removeprefix("sha256:") for task in first.tasks}
    updates = {site: load_file(files[digest].read_bytes()) for site, digest in digests.items()}
    return {site: {n: stored.view("<f4") for n, stored in update.items()} for site, update in updates.items()}


def terms_of(model: Model, base: Arrays) -> Terms:
    """The terms of the first round, as far as they decide how a site rounds its steps."""
    values = {block.name: ArrayTensor(base[block.name], "F32") for block in model.blocks}
    blocks = ring_blocks(model, [Plan()], State(0, values), None, Precision.of(32, len(SITES)))
    return Federation(len(SITES), len(SITES)).terms(blocks=blocks, max_weight=max(WEIGHTS.values()))


def trained_at(folder: Path, vit: ModelFolder, spec: Mapping[str, Any], site: str) -> tuple[Arrays, int]:
    """The new values of each block that a site trains in the first round of a run with secure sums, and its seed."""
    blobs = Folder(folder / site / "blobs")
    uploaded = upload_model(blobs, vit)
    run = RunSpec.model_validate({**spec, "model": uploaded.model, "version": uploaded.version})
    version = VersionRef(number=0, digest=uploaded.version)
    about: dict[str, Any] = {"task_id": "t", "token": 1, "kind": "train", "held_out": False, "lease_seconds": 60.0}
    half = coordinator_half(run.method, run_facts(run, vit.model))
    (plan,) = plans_of(half, State(0, {}), [Participant("any", 1)], Random(0)).values()
    task = task_of(run, plan, version, run="r", number=1, seed=training_seed(run, 1, site), **about)
    data = load_data("arrays", {"file": folder / f"{site}.safetensors"})
    direct = Direct({run.dataset: data}, TrainingSetup(torch.device("cpu")))
    env = TaskEnvironment(
        Client("http://127.0.0.1:1", "t"), {run.dataset: data.info}, direct,
        Vault(folder / site / "vault"), SharedDiskCache(blobs, frozenset()), folder,
        seed_key=derived(audit_key(site), TRAINING_SEEDS),
    )  # fmt: skip
    job = TaskRun(env, task, lambda: None, Report(), Journal(TaskRef.of(task), run.dataset, None, None))
    local = direct.local(job)
    result, _ = train(local, load(local, fetch(job, data.info)), data, None)
    return {name: values.ravel() for name, values in result.upload.items()}, job.training_seed


@pytest.mark.parametrize("noise", [False, True], ids=["exact", "noisy"])
def test_no_plain_update_is_in_the_coordinator_s_memory_during_a_secure_sum(
    tmp_path: Path, vit: ModelFolder, running: Keep, *, noise: bool
) -> None:
    spec = settings(rounds=1, quorum=4)
    # A clip norm above that of any update, so that steps are as in the plain run.
    private = {"client_privacy": {"epsilon": 1000.0, "delta": 1e-5, "clip_norm": 100.0}, "normalization": "cohort"}
    largest = max(vit.model.blocks, key=lambda block: block.numel).name
    base = {block.name: np.frombuffer(vit.block_bytes(block), "<f4") for block in vit.model.blocks}
    with CoordinatorProcess(tmp_path / "plain") as plain:
        workers = started(plain, running, tmp_path, masked=False)
        run = begun(plain.admin(), vit, {**spec, "secure_sums": None, "codec": "raw"})
        until(lambda: plain.admin().run(run.id).state == "completed", seconds=60)
        values = updates_of(plain, run)
        assert values.keys() == SITES.keys()
        # A search that cannot find what is there would find nothing in the other run either. Much of the updates'
        # memory has been used again by now, and so only some of them must be found.
        assert found_in(
            plain, {trace for update in values.values() for trace in traces_of(update[largest], places=6)}
        )
    for worker in workers.values():
        worker.kill()

    # Other random numbers than in the plain run.
    secret_spec = spec | (private if noise else {})
    found_here = {site: trained_at(tmp_path, vit, secret_spec, site) for site in SITES}
    values = {site: update for site, (update, _) in found_here.items()}
    steps = {site: {n: difference(v, base[n]) for n, v in update.items()} for site, update in values.items()}
    terms = terms_of(vit.model, base)
    integers = {site: integers_of(terms, steps[site], WEIGHTS[site], seed) for site, (_, seed) in found_here.items()}
    known = [each[site][largest] for each in (values, steps) for site in SITES]
    if not noise:
        known += [integers[site][largest].astype("<i4") for site in SITES]
    traces = {trace for each in known for trace in traces_of(each, places=2)}
    with CoordinatorProcess(tmp_path / "secret") as secret:
        started(secret, running, tmp_path)
        client = secret.admin()
        run = begun(client, vit, secret_spec)
        searches, found = 0, set[bytes]()
        while client.run(run.id).state == "running":
            found |= found_in(secret, traces)
            searches += 1
        found |= found_in(secret, traces)
        assert client.run(run.id).state == "completed"
        assert (found, searches > 0) == (set(), True)

        *_, merged = client.versions(run.id)
        if noise:
            assert merged.scalars[EPSILON] > 0
            return
        # The known bytes are right: their sum is what the helpers opened.
        opened = client.manifest(merged.digest).blocks
        for name, value in base.items():
            factor = -terms.max_weight * 2.0 ** terms.blocks[name].exponent / sum(WEIGHTS.values())
            moved = value - (sum(integers[site][name] for site in SITES) * factor).astype(np.float32)
            np.testing.assert_array_equal(np.frombuffer(client.read_blob(opened[name]), "<f4"), moved, err_msg=name)
