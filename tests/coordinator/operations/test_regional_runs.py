"""The run of a region at its own coordinator: the parent's versions take the place of its own."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from tessera.coordinator.db.tables import RunBlobRow
from tessera.shared.api.runs import ParentVersion, RegionalRun, Run
from tessera.shared.api.tasks import Submission
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.methods.base import Plan
from tessera.shared.model.selectors import Match, Selector, roles
from tessera.shared.problems import Conflict, Forbidden, Invalid, Problem
from tessera.shared.rounds.regions import COUNTS, PARENT, ROUNDS, STEP
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import ArrayTensor, as_bytes, from_bytes
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()
HEAD = "head.weight"
PARENT_RUN = {"coordinator": "https://parent.example", "run": "r1", "terms": "0" * 64}


def uploaded(client: Client, value: float) -> str:
    """A version of the parent, all of this value."""
    blocks = {b.name: np.full(b.shape, value, np.float32) for b in MODEL.blocks}
    return client.put_bytes(canonical(Manifest(blocks={n: client.put_bytes(as_bytes(v)) for n, v in blocks.items()})))


def base_of(client: Client, number: int, value: float) -> ParentVersion:
    return ParentVersion(number=number, version=uploaded(client, value))


def started(client: Client, site: str = "none", each: int = 1, **spec: Any) -> Run:
    base = ParentVersion(number=0, version=uploaded(client, 0.0), plan=spec.pop("plan", Plan()))
    parent = RegionalRun(**PARENT_RUN, rounds_each=each, base=base)
    start = {b.name: np.zeros(b.shape, np.float32) for b in MODEL.blocks}
    return start_run(client, MODEL, start, rounds=4, parent=parent, cohort={"sites": [site]}, **spec)


def head_of(client: Client, run: Run) -> float:
    manifest = client.manifest(client.run(run.id).version.digest)
    return float(from_bytes(client.read_blob(manifest.blocks[HEAD]), "F32")[0])


def site(standing: LiveCoordinator, name: str) -> ScriptedWorker:
    return ScriptedWorker(standing.client("site", site=name), datasets={"data": 10}).enrol()


def test_the_next_round_is_on_the_parents_version_in_place_of_the_regions_own(standing: LiveCoordinator) -> None:
    client, one = standing.client(), site(standing, "a-1")
    run = started(client, "a-1")
    one.train(one.take(), step=1.0)
    until(lambda: client.run(run.id).version.number == 1)
    digest = client.run(run.id).version.digest
    own = client.manifest(digest)
    assert (own.scalars[PARENT], own.scalars[ROUNDS], head_of(client, run)) == (0.0, 1.0, 1.0)
    step = own.server_state[STEP + HEAD]
    assert set(from_bytes(client.read_blob(step.digest), step.dtype)) == {1.0}
    assert one.claim(0) is None
    # The parent's next version is 1 with all values 5; repeating it changes nothing.
    base = base_of(client, 1, 5.0)
    revision = client.set_base(run.id, base).revision
    # Not by its values: those of the region's own version are released meanwhile.
    until(lambda: client.run(run.id).version.digest != digest)
    assert head_of(client, run) == 5.0
    client.set_base(run.id, base)
    assert [entry.action for entry in client.audit() if entry.run == run.id].count("run.base") == 1
    assert revision < client.run(run.id).revision
    task = one.take()
    assert (task.round, task.version.number, float(one.fetch(task)[HEAD][0, 0])) == (2, 1, 5.0)
    assert task.parent
    assert (task.parent.run, task.parent.coordinator) == ("r1", "https://parent.example")
    assert not any(n.startswith(STEP) for n in client.manifest(task.version.digest).server_state)
    # What the region alone had is released.
    with standing.services.database.snapshot() as session:
        assert session.get(RunBlobRow, (run.id, step.digest)) is None
    client.set_run_state(run.id, "cancelled")


def test_a_round_that_the_parent_has_gone_on_from_ends_and_counts(standing: LiveCoordinator) -> None:
    client, one = standing.client(), site(standing, "b-1")
    run = started(client, "b-1")
    task = one.take()
    client.set_base(run.id, base_of(client, 3, 7.0))
    until(lambda: client.run(run.id).version.number == 1)
    with pytest.raises(Problem) as refusal:
        one.train(task)
    assert refusal.value.code in ("round-closed", "task-cancelled")
    # A site that saw version 0 with other values gets another number, as it refuses two versions under one.
    again = one.take()
    assert (again.round, again.version.number, float(one.fetch(again)[HEAD][0, 0])) == (2, 1, 7.0)
    client.set_run_state(run.id, "cancelled")


def test_several_rounds_add_up_before_the_region_waits_for_its_parent(standing: LiveCoordinator) -> None:
    client, one = standing.client(), site(standing, "c-1")
    run = started(client, "c-1", each=2)
    for step in (1.0, 2.0):
        one.train(one.take(), step=step)
    until(lambda: client.run(run.id).version.number == 2)
    assert one.claim(0) is None
    manifest = client.manifest(client.run(run.id).version.digest)
    step_, counts = manifest.server_state[STEP + HEAD], manifest.server_state[COUNTS]
    assert set(from_bytes(client.read_blob(step_.digest), "F32")) == {3.0}
    # Examples are summed over rounds, and sites are the fewest of them.
    table = from_bytes(client.read_blob(counts.digest), "F64").reshape(counts.shape)
    assert set(table[0]) == {20.0}
    assert set(table[1]) == {1.0}
    client.set_run_state(run.id, "cancelled")


def test_the_parents_plan_is_that_of_the_sites(standing: LiveCoordinator) -> None:
    client, one = standing.client(), site(standing, "d-1")
    run = started(client, "d-1", plan=Plan(train=roles("head"), upload=roles("head")))
    assert [block.name for block in one.take().plan.upload.resolve(MODEL.blocks)] == [HEAD]
    client.set_run_state(run.id, "cancelled")


def test_a_base_is_refused_of_others_of_other_runs_and_without_its_blobs(standing: LiveCoordinator) -> None:
    client = standing.client("orchestrator")
    run, plain = started(client), start_run(client, MODEL, values(MODEL))
    with pytest.raises(Conflict, match="no region's"):
        client.set_base(plain.id, base_of(client, 1, 1.0))
    with pytest.raises(Forbidden, match="another caller"):
        standing.client("orchestrator").set_base(run.id, base_of(client, 1, 1.0))
    with pytest.raises(Conflict, match="no later one"):
        client.set_base(run.id, base_of(client, 0, 1.0))
    headless = Plan(train=Selector(include=(Match(names=("none.*",)),)))
    with pytest.raises(Invalid, match="plan does not fit"):
        client.set_base(run.id, base_of(client, 1, 1.0).model_copy(update={"plan": headless}))
    with pytest.raises(Invalid, match="blobs are not there"):
        client.set_base(run.id, ParentVersion(number=1, version=f"sha256:{'0' * 64}"))
    for each in (run, plain):
        client.set_run_state(each.id, "cancelled")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("server_optimizer", {"kind": "adam"}),
        ("normalization", "cohort"),
        ("keep_updates", "run"),
        ("evaluation", {"sites": True}),
    ],
)
def test_a_regions_run_only_averages(standing: LiveCoordinator, setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"only averages updates: leave out {setting}"):
        started(standing.client(), **{setting: value})


def test_a_region_that_claims_more_examples_for_a_block_than_for_its_update_is_refused(
    standing: LiveCoordinator,
) -> None:
    client, one = standing.client(), site(standing, "e-1")
    run = start_run(client, MODEL, values(MODEL), rounds=1, cohort={"sites": ["e-1"]})
    task = one.take()
    base, head = one.fetch(task)[HEAD], MODEL.by_name[HEAD]

    def send(weight: int) -> None:
        file, before = io.BytesIO(), ArrayTensor(base, "F32")
        write_update(file, task.codec, [TrainedBlock(head, ArrayTensor(base + 1, "F32"), before, weight=weight)])
        update = one.client.put_bytes(file.getvalue())
        about = {"token": task.token, "version": task.version.digest, "examples": 10}
        one.client.submit(task.id, Submission(update=update, **about))

    with pytest.raises(Problem, match="names 11 examples of its own; the update is of 10"):
        send(11)
    client.set_run_state(run.id, "cancelled")
