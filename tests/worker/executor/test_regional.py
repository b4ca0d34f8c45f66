"""Regions: a worker whose training is rounds of its region's own coordinator, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.shared.api.runs import ParentVersion, Privacy, RegionalRun, Run, RunPatch, Training
from tessera.shared.api.tasks import ParentRun, Task
from tessera.shared.client.client import Client, despite_changes
from tessera.shared.diagnostics import examined
from tessera.shared.methods.base import MethodSpec
from tessera.shared.tensors.lazy import from_bytes
from tessera.worker.doctor import checks
from tessera.worker.executor.launcher import RankSettings
from tessera.worker.executor.regional import RegionalExecutor
from tessera.worker.governance.descriptions import summary
from tessera.worker.governance.run_history import TaskStatement
from tessera.worker.privacy.cost import epsilon_of
from tessera.worker.settings import RegionSettings, WorkerSettings
from tessera.worker.stores import ledger_of
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.pretrained import plain_tokenizer
from tests.support.regions import drawn, joined, settings_of, working
from tests.support.tasks import untrained
from tests.worker.task.test_packed_runs import LLAMA, WORDS

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
        stack.enter_context(working(inner, NORTH, steps))
        stack.enter_context(joined(settings_of(tmp_path / "north", parent, inner, "north", {"min_sites": 3})))
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


def test_a_run_of_another_orchestrator_that_names_the_same_parent_is_not_used(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client, region = parent.client(), inner.client()
    other, start = inner.client("orchestrator"), values(MODEL)
    with ExitStack() as stack:
        stack.enter_context(working(inner, NORTH, lambda site, task: drawn(site, task, MODEL)))
        run = start_run(client, MODEL, start, rounds=1)
        # Uploads what the run names; the version is that of the parent, and the settings of training are not.
        first = start_run(other, MODEL, start, rounds=1)
        told = RegionalRun(
            coordinator=parent.url,
            run=run.id,
            terms="0" * 64,
            base=ParentVersion(number=0, version=first.spec.version),
        )
        false = start_run(other, MODEL, start, rounds=1, parent=told, privacy=None, max_examples=1)
        until(lambda: region.run(false.id).state == "completed")
        stack.enter_context(joined(settings_of(tmp_path / "north", parent, inner, "north", {})))
        until(lambda: client.run(run.id).state == "completed")
    (task,) = client.round(run.id, 1).tasks
    assert task.examples == 65
    assert len([one for one in region.runs() if one.spec.parent]) == 2


@pytest.mark.long
def test_an_inner_run_keeps_its_number_of_rounds_and_is_cancelled_with_the_parents(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client, region, done = parent.client(), inner.client(), list[Task]()

    def steps(site: str, task: Task) -> dict[str, np.ndarray]:
        done.append(task)
        return drawn(site, task, MODEL)

    told = {"min_sites": 3, "rounds": 2}
    settings = settings_of(tmp_path / "north", parent, inner, "north", told)
    with ExitStack() as stack:
        stack.enter_context(working(inner, NORTH, steps))
        with joined(settings):
            run = start_run(client, MODEL, values(MODEL), rounds=50, cohort={"quorum": 1})
            until(lambda: client.run(run.id).version.number >= 1)
        (own,) = region.runs()
        assert own.spec.rounds == 100
        # More rounds in its settings are for later runs: the sites have planned for these.
        more = settings.model_copy(update={"region": settings.region.model_copy(update={"rounds": 3})})
        with joined(more):
            before = client.run(run.id).version.number
            until(lambda: client.run(run.id).version.number > before)
            assert region.run(own.id).spec.rounds == 100
            client.set_run_state(run.id, "paused")
        client.set_run_state(run.id, "cancelled")
        with joined(settings):
            until(lambda: region.run(own.id).state == "cancelled")
    assert [one.id for one in region.runs()] == [own.id]


def test_the_parent_does_not_learn_why_an_inner_run_stopped(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    client, region = parent.client(), inner.client()
    for site, examples in NORTH:
        # They take no task.
        ScriptedWorker(inner.client("site", site=site), datasets={"data": examples}).enrol()
    with joined(settings_of(tmp_path / "north", parent, inner, "north", {})):
        run = start_run(client, MODEL, values(MODEL), rounds=1, cohort={"max_attempts": 1})
        own = until(lambda: next(iter(region.runs()), None))
        region.set_run_state(own.id, "cancelled")
        until(lambda: client.run(run.id).state == "paused")
    (task,) = client.round(run.id, 1).tasks
    assert task.problem
    assert task.problem.detail == "region-stopped: the region's run is cancelled; its own log has more"


def test_a_region_is_examined_by_its_coordinator(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path / "north", parent, inner, "north", {"min_sites": 2})

    def found() -> list[tuple[str, str]]:
        named = [
            (name, check) for name, check in checks(settings, probe=False) if name.split()[0] in ("region", "data")
        ]
        return [(one.verdict, one.detail) for one in examined(named)]

    assert found() == [("warn", f"{inner.url} answers, with 0 sites; 2 are needed (region.min_sites)")]
    for site in ("north-1", "north-2"):
        ScriptedWorker(inner.client("site", site=site), datasets={"data": 1}).enrol()
    assert found() == [("ok", f"{inner.url} answers, with 2 sites")]


def test_sites_see_the_parents_url_without_its_password(tmp_path: Path) -> None:
    region = RegionSettings(url="http://127.0.0.1:2", token_file=tmp_path / "token")
    (tmp_path / "token").write_text("t")
    given = (RankSettings.model_construct(devices=("cpu",)), tmp_path, None, None)
    executor = RegionalExecutor(region, "w", None, "https://me:secret@parent.example", *given)
    assert executor._parent_url == "https://me:***@parent.example"
    with pytest.raises(ValidationError, match="coordinator"):
        ParentRun(coordinator="https://x\nThis run was approved by all.", run="r", terms="0" * 64)
    with pytest.raises(ValidationError, match="orchestrator"):
        ParentRun(coordinator="https://x", run="r", terms="0" * 64, orchestrator="a\x1b[2Kb")


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


@pytest.mark.long
def test_sites_of_a_region_spend_no_more_than_the_parent_announced(
    parent: LiveCoordinator, inner: LiveCoordinator, tmp_path: Path
) -> None:
    """Two real sites, two rounds of the parent, and two inner rounds on each version."""
    privacy, client = Privacy(clip_norm=1.0, epsilon=8.0, delta=1e-2), parent.client()
    document, start = untrained(LLAMA, "causal-lm", seed=0)
    plain = Training(optimizer="sgd", learning_rate=0.1, weight_decay=0.0, batch_size=2)
    ledgers = []
    told = settings_of(tmp_path / "north", parent, inner, "north", {"min_sites": 2, "rounds": 2})
    told = told.model_copy(update={"datasets": {"notes": told.datasets["data"]}})
    with ExitStack() as stack:
        for site in ("north-1", "north-2"):
            folder = tmp_path / site
            folder.mkdir()
            (folder / "notes.jsonl").write_text(f'{{"text": "{" ".join(WORDS[:3])}"}}\n' * 6)
            notes = {
                "kind": "text", "file": str(folder / "notes.jsonl"), "head": "causal-lm", "max_length": 8,
                "tokenizer": str(plain_tokenizer(folder / "plain", WORDS)),
            }  # fmt: skip
            settings = WorkerSettings(
                url=inner.url, token=inner.token("site", site), name="w", state_dir=folder / "state", threads=1,
                poll_seconds=1, datasets={"notes": notes},
            )  # fmt: skip
            stack.enter_context(joined(settings))
            ledgers.append(ledger_of(settings))
        stack.enter_context(joined(told))
        run = start_run(client, document, start, rounds=2, dataset="notes", training=plain, privacy=privacy)
        until(lambda: client.run(run.id).state == "completed", 120)
    (own,) = inner.client().runs()
    assert (own.spec.privacy, own.spec.rounds) == (privacy, 4)
    for ledger in ledgers:
        events = [event for entry in ledger.read("notes") for event in entry.events]
        assert len(ledger.read("notes")) == 4
        # All of it is spent by the last round, and no more: the noise is that of four rounds.
        assert 7.0 < epsilon_of(events, privacy.delta) <= privacy.epsilon
