"""The memory of a coordinator's processes, as its operator could read it, has no plain update of a secure sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from tessera.shared.api.runs import Run
from tessera.shared.methods.base import Plan, State
from tessera.shared.model.spec import Model
from tessera.shared.rounds.client_privacy import EPSILON
from tessera.shared.rounds.planning import training_seed
from tessera.shared.rounds.secure_sums import Precision, ring_blocks
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.codecs.delta import difference
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.simulation.virtual_sites import WORKER
from tests.support.coordinator import until
from tests.support.processes import CoordinatorProcess, memory_of
from tests.support.secure_sums import Federation, integers_of
from tests.system.test_secure_sums import SITES, Keep, begun, settings, started

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
    updates = {site: load(files[digest].read_bytes()) for site, digest in digests.items()}
    return {site: {n: stored.view("<f4") for n, stored in update.items()} for site, update in updates.items()}


def terms_of(model: Model, base: Arrays) -> Terms:
    """The terms of the first round, as far as they decide how a site rounds its steps."""
    values = {block.name: ArrayTensor(base[block.name], "F32") for block in model.blocks}
    blocks = ring_blocks(model, [Plan()], State(0, values), None, Precision.of(32, len(SITES)))
    return Federation(len(SITES), len(SITES)).terms(blocks=blocks, max_weight=max(SITES.values()))


def integers_of_site(terms: Terms, steps: Arrays, run: Run, site: str) -> Arrays:
    """What the site has under its masks."""
    return integers_of(terms, steps, SITES[site], training_seed(run.spec, 1, f"{site}/{WORKER}"))


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

    steps = {site: {n: difference(v, base[n]) for n, v in update.items()} for site, update in values.items()}
    terms = terms_of(vit.model, base)
    integers = {site: integers_of_site(terms, steps[site], run, site) for site in SITES}
    known = [each[site][largest] for each in (values, steps) for site in SITES]
    if not noise:
        known += [integers[site][largest].astype("<i4") for site in SITES]
    traces = {trace for each in known for trace in traces_of(each, places=2)}
    with CoordinatorProcess(tmp_path / "secret") as secret:
        started(secret, running, tmp_path)
        client = secret.admin()
        run = begun(client, vit, spec | (private if noise else {}))
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
            factor = -terms.max_weight * 2.0 ** terms.blocks[name].exponent / sum(SITES.values())
            moved = value - (sum(integers[site][name] for site in SITES) * factor).astype(np.float32)
            np.testing.assert_array_equal(np.frombuffer(client.read_blob(opened[name]), "<f4"), moved, err_msg=name)
