"""Runs that make versions of few updates with a memory of the other sites' latest, or by mixing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from tessera.coordinator.db.tables import BlobRow
from tessera.shared.aggregation.robust import Median
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import Invalid
from tessera.shared.rounds.aggregate import Aggregation, NextVersion
from tessera.shared.rounds.server_step import MEMORY
from tessera.shared.tensors.lazy import from_bytes
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, head_of, small_model, start_run, values
from tests.support.paths import ROOT

pytestmark = pytest.mark.both_databases(long="postgresql")

MODEL = small_model()
START = values(MODEL)
HEAD = MODEL.by_name["head.weight"]


def remembering(client: Client, *, rounds: int = 9, **about: Any) -> Run:
    cohort = Cohort(mode="buffer", target_updates=1, quorum=1, staleness="none", memory=True)
    return start_run(client, MODEL, START, cohort=cohort, rounds=rounds, **about)


def sites(coordinator: LiveCoordinator, **examples: int) -> list[ScriptedWorker]:
    return [
        ScriptedWorker(coordinator.client("site", name), datasets={"data": count}).enrol()
        for name, count in examples.items()
    ]


def reach(client: Client, run: Run, number: int) -> None:
    until(lambda: client.run(run.id).version.number == number)


def memory_of(client: Client, run: Run) -> np.ndarray:
    """What the latest version remembers of the head."""
    manifest = Manifest.read(client.read_blob(client.run(run.id).version.digest), client.read_blob)
    entry = manifest.server_state[MEMORY + HEAD.name]
    return from_bytes(client.read_blob(entry.digest), entry.dtype).reshape(entry.shape)


class Loop:
    """The formula, with one number for the step of a site."""

    def __init__(self) -> None:
        self.latest: dict[str, tuple[float, float]] = {}
        self.head = 0.0

    def send(self, site: str, weight: float, step: float) -> None:
        before = sum(w * d for w, d in self.latest.values())
        old_weight, old = self.latest.get(site, (0.0, 0.0))
        self.latest[site] = (weight, step)
        total = sum(w for w, _ in self.latest.values())
        self.head += weight / total * before / total + (weight * step - old_weight * old) / total

    @property
    def mean(self) -> float:
        return sum(w * d for w, d in self.latest.values()) / sum(w for w, _ in self.latest.values())


def played(coordinator: LiveCoordinator, **about: Any) -> tuple[Client, Run, list[ScriptedWorker], Loop]:
    """A run on version 5: of a slow site, one update of version 0."""
    client, loop = coordinator.client(), Loop()
    a, b, slow = workers = sites(coordinator, a=10, b=20, slow=30)
    run = remembering(client, **about)
    late = slow.take()
    for number, (worker, name, step) in enumerate(((a, "a", 1.0), (b, "b", -0.5), (a, "a", 0.5)), start=1):
        worker.train(worker.take(), step=step)
        loop.send(name, worker.datasets["data"], step)
        reach(client, run, number)
    slow.train(late, step=2.0)
    loop.send("slow", 30, 2.0)
    reach(client, run, 4)
    b.train(b.take(), step=0.25)
    loop.send("b", 20, 0.25)
    reach(client, run, 5)
    return client, run, workers, loop


def remerged(coordinator: LiveCoordinator, run: Run, *options: str) -> subprocess.CompletedProcess[str]:
    places = coordinator.settings
    settings = {
        "TESSERA_DATABASE_URL": places.database_url,
        "TESSERA_BLOB_URL": places.blob_url,
        "TESSERA_STAGING_DIR": str(places.staging_dir),
    }
    command = [sys.executable, "-m", "tessera.shared.cli", "coordinator", "remerge", run.id, *options]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )


def test_a_fast_site_s_versions_go_on_with_the_slow_site_s_latest_step(coordinator: LiveCoordinator) -> None:
    client, run, _, loop = played(coordinator, keep_updates="run")
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + loop.head, atol=1e-5)
    np.testing.assert_allclose(memory_of(client, run), loop.mean, atol=1e-6)
    # Another process, from the tables and the blobs alone.
    again = remerged(coordinator, run)
    assert (again.returncode, again.stdout) == (0, "5 versions have the same digests\n"), again.stderr
    without = remerged(coordinator, run, "--without", "b")
    assert without.returncode == 0, without.stderr
    (made,) = (one for one in client.runs() if one.id != run.id)
    others = Loop()
    for name, weight, step in (("a", 10, 1.0), ("a", 10, 0.5), ("slow", 30, 2.0)):
        others.send(name, weight, step)
    np.testing.assert_allclose(head_of(client, made), START["head.weight"] + others.head, atol=1e-5)
    np.testing.assert_allclose(memory_of(client, made), others.mean, atol=1e-6)


def test_a_site_that_withdraws_leaves_the_memory(coordinator: LiveCoordinator) -> None:
    client, run, (a, _, _), loop = played(coordinator)
    (site,) = (one for one in client.sites() if one.name == "slow")
    client.withdraw_site(site.id)
    del loop.latest["slow"]
    a.train(a.take(), step=0.75)
    loop.send("a", 10, 0.75)
    reach(client, run, 6)
    np.testing.assert_allclose(memory_of(client, run), loop.mean, atol=1e-6)
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + loop.head, atol=1e-5)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_merge_that_a_withdrawal_overtakes_is_made_again(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    client, run, (a, _, _), loop = played(coordinator)
    ids, merge = {site.name: site.id for site in client.sites()}, Aggregation.merge
    # The next memory is then computed from the updates of the others.
    client.withdraw_site(ids["b"])
    left = [ids["slow"]]

    def overtaken(*about: Any) -> NextVersion:
        """Merge, and withdraw a site of the memory before its update is read or before the commit."""
        made = merge(*about) if is_read else None
        while left:
            client.withdraw_site(left.pop())
        return made or merge(*about)

    monkeypatch.setattr(Aggregation, "merge", overtaken)
    a.train(a.take(), step=0.75)
    until(lambda: client.run(run.id).version.number == 6 or client.run(run.id).state == "paused")
    assert (client.run(run.id).state, client.run(run.id).reason) == ("running", None)
    loop.latest = {"a": loop.latest["a"]}
    loop.send("a", 10, 0.75)
    np.testing.assert_allclose(memory_of(client, run), loop.mean, atol=1e-6)


def test_what_the_memory_takes_is_kept_while_the_run_lives(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, keep_versions=1, keep_updates_seconds=60) as live:
        client, run, (a, b, slow), loop = played(live, rounds=7)
        live.elapse(200, a, b, slow)
        live.services.retention.collect()
        with live.services.database.snapshot() as session:
            kept = set(session.scalars(select(BlobRow.digest)))
        sent = [t for r in client.rounds(run.id) for t in r.tasks if t.state == "merged"]
        # Of the five, one of a and one of b were followed by another.
        assert sum(task.update in kept for task in sent) == 3
        slow.train(slow.take(), step=1.0)
        loop.send("slow", 30, 1.0)
        reach(client, run, 6)
        np.testing.assert_allclose(memory_of(client, run), loop.mean, atol=1e-6)
        b.train(b.take(), step=1.0)
        until(lambda: client.run(run.id).state == "completed")
        live.elapse(200, a, b, slow)
        live.services.retention.collect()
        with live.services.database.snapshot() as session:
            kept = set(session.scalars(select(BlobRow.digest)))
        assert not any(task.update in kept for task in sent)


def test_mixing_moves_each_version_by_a_share(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, slow = sites(coordinator, a=10, slow=10)
    run = start_run(
        client,
        MODEL,
        START,
        rounds=9,
        keep_updates="run",
        cohort=Cohort(mode="buffer", target_updates=1, quorum=1, mixing=0.5),
    )
    late, head = slow.take(), 0.0
    for number in (1, 2, 3):
        a.train(a.take(), step=1.0)
        # Of the present version, so that its values are one step ahead.
        head += 0.5
        reach(client, run, number)
    slow.train(late, step=1.0)
    reach(client, run, 4)
    # It sent the first version and 1; three versions were made since.
    head += 0.5 / 2 * (1.0 - head)
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + head, atol=1e-6)
    again = remerged(coordinator, run)
    assert (again.returncode, again.stdout) == (0, "4 versions have the same digests\n"), again.stderr


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a partial method": (
        {"method": MethodSpec(name="safl", settings={"score": "random"})},
        "leave out cohort.memory, or choose a method such as fedavg",
    ),
    "a freezing method": (
        {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": 2})},
        "leave out cohort.memory",
    ),
    "another mean": ({"method": MethodSpec(name="fednova")}, "leave out cohort.memory"),
    "a robust rule": ({"robust": Median(attackers=1)}, "robust: cohort.memory would bring back the steps"),
}


def test_a_robust_rule_takes_no_versions_of_one_update(standing: LiveCoordinator) -> None:
    cohort = Cohort(mode="buffer", target_updates=1, mixing=0.5)
    with pytest.raises(ValueError, match="needs updates of at least 3 sites"):
        start_run(standing.client(), MODEL, START, cohort=cohort, rounds=3, robust=Median(attackers=1))


@pytest.mark.parametrize("setting", UNFIT)
def test_what_sends_other_blocks_refuses_a_memory(standing: LiveCoordinator, setting: str) -> None:
    about, said = UNFIT[setting]
    cohort = Cohort(mode="buffer", quorum=3, staleness="none", memory=True)
    with pytest.raises((Invalid, ValueError)) as refused:
        start_run(standing.client(), MODEL, START, cohort=cohort, rounds=20, **about)
    detail = refused.value.errors[0].detail if isinstance(refused.value, Invalid) else str(refused.value)
    assert said in detail


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "moon"])
def test_methods_whose_sites_send_all_blocks_have_a_memory(standing: LiveCoordinator, name: str) -> None:
    cohort = Cohort(mode="buffer", staleness="none", memory=True)
    about = {"method": MethodSpec(name=name)}
    assert start_run(standing.client(), MODEL, START, cohort=cohort, rounds=3, **about).state == "running"
