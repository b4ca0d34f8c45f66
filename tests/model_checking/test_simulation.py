"""Whole federations on fixed seeds: the real storage, operations and conductor, and everything that may go wrong."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from tessera.coordinator.db import snapshots, versions
from tessera.shared.rounds.aggregate import AcceptedUpdate
from tests.model_checking.actors import POLITE
from tests.model_checking.crash_points import DIFFER, SHAPES, between_actions, killed, undisturbed
from tests.model_checking.federation import Federation, Shape, simulate, workplace
from tests.model_checking.invariants import Violated
from tests.model_checking.schedule import NONE
from tests.mutants.planted import FAULTS, hunt
from tests.support.variants import variants

SEEDS = 2
LAPSING = 9045
"""Needs every worker in each round and gives each task one lease: it ends only if calm workers renew their leases."""
HUNTED = range(2000)
simulated = cache(simulate)
CRASHES = 2
"""Points of each shape at which something is killed; `make simulation` takes all of them."""
SHORT = {"one worker, all in the database", "two workers, files, uploads", "two workers, no rounds"}
"""The shapes that `make test` takes: small blobs in the database, and blobs in files."""


@pytest.mark.parametrize("seed", variants([*range(SEEDS), LAPSING], {0}))
def test_no_invariant_is_broken(seed: int) -> None:
    assert simulated(seed).state in ("completed", "cancelled", "failed")


@pytest.mark.parametrize("seed", variants(range(20), {0}))
def test_a_run_without_rounds_breaks_no_invariant(seed: int) -> None:
    shape = Shape(workers=3, rounds=0, evaluates=True, quorum=2, max_task_attempts=2, whims=2, replicas=1 + seed % 2)
    assert simulate(seed, shape=shape).state in ("completed", "cancelled")


@pytest.mark.parametrize("seed", variants(range(20), {0, 1}))
def test_a_run_that_buffers_updates_breaks_no_invariant(seed: int) -> None:
    assert simulate(seed, shape=Shape.buffered(seed)).state in ("completed", "cancelled", "failed")


@pytest.mark.parametrize("seed", variants(range(20), {0, 1}))
def test_a_run_with_a_memory_and_a_cap_breaks_no_invariant(seed: int) -> None:
    assert simulate(seed, shape=Shape.remembering(seed)).state in ("completed", "cancelled", "failed", "paused")


def test_a_memory_of_other_updates_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> list[AcceptedUpdate]:
        return []

    monkeypatch.setattr(versions, "latest_updates", none)
    shape = Shape(workers=3, mode="buffer", memory=True, rounds=4, quorum=1, target_updates=1)
    with pytest.raises(Violated, match="memory"):
        simulate(3, shape=shape, storm_steps=0)


def test_a_site_that_is_asked_beyond_its_cap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "sites_done", lambda *_: set())
    shape = Shape(workers=2, mode="buffer", max_updates_per_site=1, rounds=4, quorum=1, target_updates=1)
    with pytest.raises(Violated, match="cap"):
        simulate(3, shape=shape, storm_steps=0)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_site_waits_for_one_that_is_away_or_one_in_a_queue_and_nothing_is_lost() -> None:
    """d waits an hour before each task, and c is away for ten versions."""
    shape = Shape(workers=4, rounds=45, mode="buffer", quorum=2, target_updates=2, max_staleness=500)
    manners = replace(POLITE, longest_silence=20.0)
    with workplace() as folder, closing(Federation(7, folder, NONE, manners, shape)) as federation:
        *others, away, queued = federation.workers
        for worker in others:
            worker.queue_seconds = 120.0
        queued.queue_seconds = 3600.0
        watch, schedule = federation.watch, federation.schedule
        began, gone, made = schedule.at, 0, dict[int, float]()
        with federation.world.virtual():
            federation._begin()
            while not federation._over():
                watch.look(schedule.step())
                number = next((row["version_number"] for row in watch.rows("runs").values()), 0)
                made.setdefault(number, schedule.at - began)
                if number == 5 and not away.has_left:
                    away.leave()
                elif away.has_left and number == 15:
                    away.has_left, gone = False, number
                    away.start()
        federation._judge(0)
        tasks = list(watch.rows("tasks").values())
    assert gone == 15
    assert max(made[number] - made[number - 1] for number in range(1, 46)) < 300
    sites = {key: row["site_id"] for key, row in watch.rows("workers").items()}
    merged = {site: [t for t in tasks if sites[t["worker_id"]] == site and t["state"] == "merged"] for site in "abcd"}
    # Whatever was accepted was merged, but for what came for the last version.
    assert sum(task["state"] == "left_out" for task in tasks) <= 4
    hour = made[max(made)] / 3600
    assert 1 <= len(merged["d"]) <= hour
    assert all(task["merged_in"] - task["version_number"] > 10 for task in merged["d"])
    assert min(task["merged_in"] for task in merged["c"]) <= 6
    assert not any(6 < task["merged_in"] < 15 for task in merged["c"] if task["version_number"] > 6)
    assert any(task["merged_in"] > 15 for task in merged["c"])


@pytest.mark.parametrize("seed", variants(range(20), {0, 1}))
@pytest.mark.parametrize("buffers", [False, True])
def test_a_run_whose_rounds_close_by_arrivals_breaks_no_invariant(seed: int, *, buffers: bool) -> None:
    drawn = Shape.buffered(seed) if buffers else Shape.drawn(Random(seed))
    shape = replace(drawn, workers=4, quorum=2, adaptive_deadline=True, size=None, target_updates=None)
    assert simulate(seed, shape=shape).state in ("completed", "cancelled", "failed")


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", HUNTED[::100])
def test_no_invariant_is_broken_in_the_hunt(first: int) -> None:
    for seed in HUNTED[first : first + 100]:
        assert simulate(seed).state in ("completed", "cancelled", "failed")


def test_a_seed_tells_everything() -> None:
    assert simulate(1) == simulated(1)


def test_other_seeds_are_other_federations() -> None:
    assert simulated(0).trace != simulated(1).trace


def planted_in(when: str) -> list[str]:
    return [name for name, fault in FAULTS.items() if fault.planted_in == when]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        *planted_in("make test"),
        *(pytest.param(name, marks=pytest.mark.long) for name in planted_in("make test-long")),
    ],
)
def test_a_planted_fault_is_found(name: str) -> None:
    assert hunt(name), f"the simulation does not find that {name}"


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]
)
def test_a_round_that_is_killed_anywhere_ends_with_the_same_bits(name: str) -> None:
    calm, points = undisturbed(SHAPES[name])
    assert calm.state == "completed"
    for number, point in enumerate(points[3 :: len(points) // CRASHES]):
        found = killed(SHAPES[name], point, power_cut=number % 2 == 0)
        ends = found.digest if name in DIFFER else calm.digest
        assert (found.state, found.digest) == ("completed", ends), f"killed at point {point}"


def test_a_conductor_that_is_killed_between_two_actions_of_a_round_goes_on_with_the_next() -> None:
    shape = replace(SHAPES["one worker, all in the database"], rounds=2)
    calm, points = between_actions(shape)
    one, two = "committed", ("open", "merging", "committed")
    assert [*points] == [(), *((state,) for state in two), *((one, state) for state in two)]
    for number, (states, point) in enumerate(points.items()):
        found = killed(shape, point, power_cut=number % 2 == 0)
        assert (found.state, found.digest) == ("completed", calm.digest), f"killed when rounds were {states}"
