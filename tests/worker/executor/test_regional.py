"""Regions: a worker whose training is rounds of its region's own coordinator, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.shared.api.runs import Run, RunPatch
from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client, despite_changes
from tessera.shared.methods.base import MethodSpec
from tessera.shared.tensors.lazy import from_bytes
from tessera.worker.governance.descriptions import summary
from tessera.worker.governance.run_history import TaskStatement
from tessera.worker.settings import WorkerSettings
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import small_model, start_run, values
from tests.support.regions import drawn, joined, settings_of, working

ALONE = [("alone-1", 10), ("alone-2", 30)]
TOP = ["alone-1", "alone-2", "north"]
MODEL = small_model(32)
HEAD = "head.weight"
UNBOUNDED: dict[str, Any] = {"max_examples": "unlimited", "max_norm_of_median": "unlimited", "seed": 3}
NORTH = [("north-1", 5), ("north-2", 20), ("north-3", 40)]


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "parent") as live:
        yield live


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "inner") as live:
        yield live


def blocks_of(client: Client, run: Run) -> dict[str, np.ndarray]:
    """The latest version's blocks, flat."""
    manifest = client.manifest(client.run(run.id).version.digest)
    return {b.name: from_bytes(client.read_blob(manifest.blocks[b.name]), b.dtype) for b in MODEL.blocks}


def test_two_levels_give_the_flat_mean_within_a_rounding_for_each_region(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    start, client = values(MODEL), parent.client()

    def steps(site: str, task: Task) -> dict[str, np.ndarray]:
        moved = drawn(site, task, MODEL)
        # One site sends a part of the model: the other blocks weigh by the examples of the others.
        return moved if site != "north-1" else {n: s for n, s in moved.items() if "mlp" not in n}

    with working(parent, [*ALONE, *NORTH], steps):
        flat = start_run(client, MODEL, start, **UNBOUNDED, rounds=1, cohort={"quorum": 5})
        until(lambda: client.run(flat.id).state == "completed")
    with ExitStack() as stack:
        stack.enter_context(working(inner, NORTH, steps))
        stack.enter_context(joined(settings_of(tmp_path / "north", parent, inner, "north", {"min_sites": 2})))
        stack.enter_context(working(parent, ALONE, steps))
        nested = start_run(client, MODEL, start, **UNBOUNDED, rounds=1, cohort={"quorum": 3, "sites": TOP})
        until(lambda: client.run(nested.id).state == "completed")
    one, other = blocks_of(client, flat), blocks_of(client, nested)
    task = next(t for t in client.round(nested.id, 1).tasks if t.worker == "north/region")
    assert (task.examples, task.metrics["region_sites"]) == (65, 3.0)
    for name, block in one.items():
        # The sums are float32 in both, in another order for one region, and a version is rounded once.
        assert np.abs(block - other[name]).max() <= 2 * 2.0**-24 * np.abs(block).max(), name
        assert not np.array_equal(block, start[name].ravel())


def test_one_inner_run_goes_through_all_rounds_of_the_parent(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client, region, seen = parent.client(), inner.client(), list[tuple[str, int, int]]()
    approvals, told, asked = set[str](), set[str](), set[str]()

    def steps(site: str, task: Task) -> dict[str, np.ndarray]:
        seen.append((site, task.round, task.version.number))
        assert (task.rounds, task.parent and task.parent.run) == (3, run.id if site in dict(NORTH) else None)
        if task.parent:
            approvals.add(TaskStatement.of(task).terms_digest("train"))
            told.add(summary(task, MODEL, 10))
        else:
            asked.add(TaskStatement.of(task).terms_digest("train"))
        return drawn(site, task, MODEL)

    with ExitStack() as stack:
        stack.enter_context(working(parent, ALONE, steps))
        stack.enter_context(working(inner, NORTH, steps))
        run = start_run(client, MODEL, values(MODEL), rounds=3, cohort={"quorum": 3, "sites": TOP})
        stack.enter_context(joined(settings_of(tmp_path / "north", parent, inner, "north", {})))
        until(lambda: client.run(run.id).state == "completed")
        (own,) = region.runs()
        until(lambda: region.run(own.id).state == "completed")
    # A site of the region approves once, and reads which run of the parent it is: that of the sites outside.
    assert (len(approvals), len(told), own.spec.parent and own.spec.parent.terms) == (1, 1, asked.pop())
    assert f"sends the mean of the region's updates to {parent.url}" in told.pop()
    # Each site was asked once for each of the parent's versions, as in a flat run.
    assert sorted(seen) == sorted((site, n, n - 1) for site, _ in [*ALONE, *NORTH] for n in (1, 2, 3))
    ours, theirs = list(region.versions(own.id)), list(client.versions(run.id))
    assert [one.number for one in ours] == [one.number for one in theirs] == [0, 1, 2, 3]
    for one, other in list(zip(ours, theirs, strict=True))[:3]:
        # The region trained on the parent's versions, and its own last one is of its sites alone.
        assert region.manifest(one.digest).blocks == client.manifest(other.digest).blocks
    assert region.manifest(ours[3].digest).blocks != client.manifest(theirs[3].digest).blocks
    entries = [entry.action for entry in region.audit() if entry.run == own.id]
    assert entries.count("version.adopt") == entries.count("run.base") == 2


def test_a_method_that_a_region_cannot_do_is_not_offered_and_a_setting_ends_the_task(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client = parent.client()
    with joined(settings_of(tmp_path / "north", parent, inner, "north", {})):
        with working(inner, NORTH, lambda site, task: drawn(site, task, MODEL)):
            until(lambda: [one for one in client.workers() if one.datasets == {"data": 65}])
        frozen = {"name": "fedfrozen", "settings": {"warmup_rounds": "auto"}}
        run = start_run(client, MODEL, values(MODEL), rounds=3, method=frozen, cohort={"max_attempts": 1})
        until(lambda: client.run(run.id).state == "paused")
        plain = run.spec.training.model_copy(update={"optimizer": "sgd", "momentum": 0.0})
        scaffold = run.spec.model_copy(update={"method": MethodSpec(name="scaffold"), "training": plain})
        (preview,) = client.preview_run(scaffold).workers
    (task,) = client.round(run.id, 1).tasks
    assert task.problem
    assert "the method fedfrozen with these settings merges more than means of blocks" in str(task.problem.detail)
    assert [one.rule for one in preview.ineligibilities] == ["methods"]
    assert list(inner.client().runs()) == []


def test_a_block_of_too_few_sites_stays_in_the_region(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client = parent.client()

    def steps(site: str, task: Task) -> dict[str, np.ndarray]:
        # The head comes from all three sites, and the rest from two.
        moved = drawn(site, task, MODEL)
        return moved if site != "north-1" else {HEAD: moved[HEAD]}

    with ExitStack() as stack:
        stack.enter_context(joined(settings_of(tmp_path / "north", parent, inner, "north", {"min_sites": 3})))
        stack.enter_context(working(inner, NORTH, steps))
        run = start_run(client, MODEL, values(MODEL), rounds=1)
        until(lambda: client.run(run.id).state == "completed")
    (task,) = client.round(run.id, 1).tasks
    before, after = (client.manifest(one.digest).blocks for one in client.versions(run.id))
    assert [name for name in after if after[name] != before[name]] == [HEAD]
    assert task.metrics["region_withheld_blocks"] == len(MODEL.blocks) - 1


def test_no_update_of_too_few_sites_leaves_a_region_whoever_lowers_its_quorum(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client, region = parent.client(), inner.client()
    with ExitStack() as stack:
        stack.enter_context(working(inner, NORTH[1:], lambda site, task: drawn(site, task, MODEL)))
        stack.enter_context(joined(settings_of(tmp_path / "north", parent, inner, "north", {"min_sites": 3})))
        run = start_run(client, MODEL, values(MODEL), rounds=1, cohort={"max_attempts": 1})
        own = until(lambda: next(iter(region.runs()), None))
        assert own.spec.cohort.quorum == 3
        despite_changes(lambda: region.patch_run(own.id, RunPatch(cohort={"quorum": 1})))
        until(lambda: client.run(run.id).state == "paused")
    (task,) = client.round(run.id, 1).tasks
    assert task.problem
    assert task.problem.detail == "region-too-small: updates of 2 sites were merged; 3 are needed"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"policy": {"max_weekly_privacy": {"epsilon": 1, "delta": 1e-5}}}, "policy.max_weekly_privacy are for a"),
        ({"datasets": {"data": {"kind": "digits"}}}, 'datasets.data.kind: it is "region" in the settings'),
        ({"region": None}, 'datasets.data.kind: it is "region" in the settings'),
        ({"region": {"url": "http://x", "token_file": "t", "min_sites": 1}}, "greater than or equal to 2"),
    ],
)
def test_the_settings_of_a_region_are_not_those_of_a_site(others: dict[str, Any], said: str, tmp_path: Path) -> None:
    told = {"url": "http://127.0.0.1:1", "token": "t", "name": "w", "state_dir": tmp_path}
    region = {"url": "http://127.0.0.1:2", "token_file": "t"}
    with pytest.raises(ValidationError, match=said):
        WorkerSettings(**{**told, "datasets": {"data": {"kind": "region"}}, "region": region, **others})


@pytest.mark.long
def test_the_bytes_of_the_parent_fall_by_the_number_of_sites_in_a_region(tmp_path: Path) -> None:
    """Three regions of twenty sites, against sixty sites at one coordinator."""
    rounds, model = 3, small_model(128)
    sites = {region: [(f"{region}-{n:02}", 10 + n) for n in range(20)] for region in ("north", "south", "west")}

    def steps(site: str, task: Task) -> dict[str, np.ndarray]:
        return drawn(site, task, model)

    everyone = [one for members in sites.values() for one in members]

    def moved(coordinator: LiveCoordinator, run: Run) -> tuple[int, int]:
        tasks = [task for one in coordinator.client().rounds(run.id) for task in one.tasks]
        return sum(task.upload_bytes for task in tasks), len(tasks)

    with LiveCoordinator(tmp_path / "flat") as flat, working(flat, everyone, steps):
        client = flat.client()
        one = start_run(client, model, values(model), rounds=rounds, cohort={"quorum": 60, "size": 60}, **UNBOUNDED)
        until(lambda: client.run(one.id).state == "completed", 300)
        plain, end = moved(flat, one), client.manifest(client.run(one.id).version.digest)
        head = from_bytes(client.read_blob(end.blocks[HEAD]), "F32")
    with ExitStack() as stack:
        parent = stack.enter_context(LiveCoordinator(tmp_path / "parent"))
        for region, members in sites.items():
            inner = stack.enter_context(LiveCoordinator(tmp_path / region))
            stack.enter_context(working(inner, members, steps))
            told = {"min_sites": 20}
            stack.enter_context(joined(settings_of(tmp_path / f"{region}-process", parent, inner, region, told)))
        client = parent.client()
        two = start_run(client, model, values(model), rounds=rounds, cohort={"quorum": 3, "size": 3}, **UNBOUNDED)
        until(lambda: client.run(two.id).state == "completed", 300)
        nested, end = moved(parent, two), client.manifest(client.run(two.id).version.digest)
        other = from_bytes(client.read_blob(end.blocks[HEAD]), "F32")
    print(f"\nflat: {plain[0]:,} bytes up in {plain[1]} updates; two levels: {nested[0]:,} bytes in {nested[1]}")
    assert (plain[1], nested[1]) == (60 * rounds, 3 * rounds)
    # The codecs differ, of new values and of steps, by less than a quarter.
    assert plain[0] / nested[0] == pytest.approx(20, rel=0.25)
    np.testing.assert_allclose(head, other, rtol=0, atol=1e-5)
