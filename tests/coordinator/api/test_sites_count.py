"""What one site may do to a run with default settings, over HTTP: it counts once, and for no more than others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.coordinator.db.snapshots import live_workers, run_snapshot
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, Training
from tessera.shared.api.tasks import Task
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tests.support.cli import tessera
from tests.support.coordinator import Clock, LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, head_of, small_model, start_run, values
from tests.support.variants import variants

MODEL = small_model()
START = values(MODEL)
HEAD = START["head.weight"]
HONEST = "abcd"
_names = itertools.count()

Taken = list[tuple[ScriptedWorker, Task]]


def begun(live: LiveCoordinator, examples: Sequence[tuple[str, int]], **spec: Any) -> tuple[Client, Run, Taken]:
    """A run among workers that are given by their sites' names and by what they declare, and the tasks of those that
    got one. A site's workers share its token."""
    client, dataset = live.client(), f"data{next(_names)}"
    sites = {site: live.client("site", site) for site, _ in examples}
    workers = [
        ScriptedWorker(sites[site], name=f"{dataset}-{place}", datasets={dataset: count}).enrol()
        for place, (site, count) in enumerate(examples)
    ]
    run = start_run(client, MODEL, START, **{"dataset": dataset, **spec})
    until(lambda: list(client.rounds(run.id)))
    return client, run, [(worker, task) for worker in workers if (task := worker.claim(0))]


def moved(client: Client, run: Run) -> np.ndarray:
    """How far the first version's head is from where it began."""
    until(lambda: client.run(run.id).version.number == 1)
    step: np.ndarray = head_of(client, run) - HEAD
    return step


def site_of(client: Client, run: Run) -> list[str]:
    """The sites of a run's first round, a worker each."""
    return [task.worker.partition("/")[0] for task in client.round(run.id, 1).tasks]


def test_a_site_that_declares_examples_without_end_does_not_have_the_model(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, [*((site, 1000) for site in HONEST), ("x", (1 << 40) - 1)])
    for worker, task in taken:
        worker.train(task, -0.04 if worker.client is taken[-1][0].client else 0.01)
    # Four honest sites of 1,000 examples, and one that weighs as 4 x 1,000: (4 x 0.01 - 4 x 0.04) / 8.
    np.testing.assert_allclose(moved(client, run), -0.015, rtol=1e-4)
    bounds = client.run(run.id).bounds
    assert bounds is not None
    assert bounds.max_examples == 4000


def test_an_update_far_larger_than_the_others_is_left_out_by_default(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, [*((site, 1000) for site in HONEST), ("x", (1 << 40) - 1)])
    for worker, task in taken[:-1]:
        worker.train(task, 0.01)
    taken[-1][0].train(taken[-1][1], -5.0)
    np.testing.assert_allclose(moved(client, run), 0.01, rtol=1e-4)
    (warning,) = list(client.versions(run.id))[-1].warnings
    assert "larger than 10.0 times the largest median" in warning


def test_sixteen_workers_of_one_token_are_one_in_a_cohort(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, [*((site, 1000) for site in HONEST), *[("x", 1000)] * 16], max_examples=1000)
    assert sorted(site_of(client, run)) == [*HONEST, "x"]
    for worker, task in taken:
        worker.train(task, -0.04 if worker is taken[-1][0] else 0.01)
    np.testing.assert_allclose(moved(client, run), 0, atol=1e-6)


@pytest.mark.parametrize("workers_per_site", [pytest.param(1, marks=pytest.mark.long), 6])
def test_six_workers_of_one_token_are_one_for_a_robust_rule(standing: LiveCoordinator, workers_per_site: int) -> None:
    cohort = Cohort(quorum=3, workers_per_site=workers_per_site)
    robust = {"rule": "median", "attackers": 1}
    client, run, taken = begun(standing, [*((s, 10) for s in HONEST), *[("x", 10)] * 6], cohort=cohort, robust=robust)
    assert len(taken) == len(HONEST) + workers_per_site
    for place, (worker, task) in enumerate(taken):
        worker.train(task, 0.01 if place < len(HONEST) else -5.0)
    # Of five sites, one is hostile.
    np.testing.assert_allclose(moved(client, run), 0.01, rtol=1e-4)


def test_many_workers_of_one_site_are_no_quorum(standing: LiveCoordinator) -> None:
    cohort = Cohort(quorum=2, workers_per_site=8)
    client, dataset = standing.client(), f"data{next(_names)}"
    site = standing.client("site", "a")
    for place in range(3):
        ScriptedWorker(site, name=f"{dataset}-{place}", datasets={dataset: 10}).enrol()
    run = start_run(client, MODEL, START, dataset=dataset, cohort=cohort)
    found = client.preview_run(run.spec)
    assert (found.eligible, found.quorum) == (1, 2)
    assert list(client.rounds(run.id)) == []
    ScriptedWorker(standing.client("site", "b"), name=dataset, datasets={dataset: 10}).enrol()
    until(lambda: list(client.rounds(run.id)))
    assert sorted(site_of(client, run)) == ["a", "a", "a", "b"]


def test_the_updates_of_one_site_are_averaged_by_their_examples_and_then_are_one(standing: LiveCoordinator) -> None:
    cohort = Cohort(quorum=2, workers_per_site=2)
    client, run, taken = begun(standing, [("a", 10), ("a", 30), ("b", 40)], cohort=cohort, max_examples=20)
    for (worker, task), step in zip(taken, (1.0, 3.0, -1.0), strict=True):
        worker.train(task, step)
    # (10 x 1 + 30 x 3) / 40 is 2.5, of a site that weighs 20 as the other does: (2.5 - 1) / 2.
    np.testing.assert_allclose(moved(client, run), 0.75, rtol=1e-5)


def test_a_site_s_larger_update_does_not_hide_among_its_smaller_ones(standing: LiveCoordinator) -> None:
    cohort = Cohort(quorum=4, workers_per_site=3)
    client, run, taken = begun(standing, [("a", 10), ("b", 10), ("c", 10), *[("x", 10)] * 3], cohort=cohort)
    for (worker, task), step in zip(taken, (1.0, 1.0, 1.0, 0.01, 0.01, -100.0), strict=True):
        worker.train(task, step)
    np.testing.assert_allclose(moved(client, run), 1.0, rtol=1e-5)
    left_out = [task.metrics.get("anomaly.left_out") for task in client.round(run.id, 1).tasks]
    assert left_out.count(1.0) == 3


def test_the_worker_that_did_the_last_round_does_the_next_while_it_is_live(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, [("a", 10), ("a", 10), ("a", 10), ("b", 10)], rounds=3)
    workers = {worker.name: worker for worker, _ in taken}
    (first,) = [worker for worker, _ in taken if worker.client is not taken[-1][0].client]
    for number in range(1, 4):
        asked = until(lambda: [r for r in client.rounds(run.id) if r.number == number])[0].tasks  # noqa: B023
        assert sorted(task.worker for task in asked) == sorted([f"a/{first.name}", f"b/{taken[-1][0].name}"])
        for worker in workers.values():
            worker.train(worker.take())
        until(lambda: client.run(run.id).version.number == number)  # noqa: B023


def test_an_update_that_was_left_out_does_not_make_its_worker_the_one_of_its_site(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock) as live:
        client, site = live.client(), live.client("site", "a")
        first, second = (ScriptedWorker(site, name=name) for name in ("first", "second"))
        other = ScriptedWorker(live.client("site", "b"), name="other")
        for worker in (first, other):
            worker.enrol()
        run = start_run(client, MODEL, START, rounds=3, cohort=Cohort(quorum=2, deadline_seconds=30))
        tasks = [worker.take() for worker in (first, other)]
        # So that no round opens before the first worker is away.
        client.set_run_state(run.id, "paused")
        for worker, task in zip((first, other), tasks, strict=True):
            worker.train(task)
        until(lambda: client.run(run.id).version.number == 1)
        clock.advance(live.settings.liveness_seconds + 1)
        for worker in (second, other):
            worker.enrol()
        client.set_run_state(run.id, "running")
        second.train(second.take())
        # The other site does not answer, and the attempt is abandoned.
        for worker in (first, second, other):
            worker.enrol()
        clock.advance(31)
        until(lambda: client.round(run.id, 2).attempt == 2)
        assert sorted(task.worker for task in client.round(run.id, 2).tasks) == ["a/first", "b/other"]


@pytest.mark.parametrize(
    ("method", "others"),
    # Both keep something that the server counts.
    [("scaffold", False), pytest.param("feddyn", False, marks=pytest.mark.long), ("fedavg", True)],
)
def test_no_other_worker_takes_the_place_of_one_whose_kept_state_the_server_counts(
    tmp_path: Path, method: str, others: bool
) -> None:
    clock = Clock()
    training = Training(optimizer="sgd", learning_rate=0.1)
    with LiveCoordinator(tmp_path, clock=clock) as live:
        client, site = live.client(), live.client("site", "a")
        first, second = (ScriptedWorker(site, name=name, methods=(method,)) for name in ("first", "second"))
        first.enrol()
        run = start_run(client, MODEL, START, rounds=3, method=MethodSpec(name=method), training=training)
        task = first.take()
        # So that no round opens before the second worker is the only one there.
        client.set_run_state(run.id, "paused")
        first.train(task, 0.01, steps=1)
        until(lambda: client.run(run.id).version.number == 1)
        clock.advance(live.settings.liveness_seconds + 1)
        second.enrol()
        with live.services.database.snapshot() as session:
            there = live_workers(session, clock() - live.settings.liveness_seconds)
            assert [worker.name for worker in there] == ["a/second"]
            # Counted as absent, so that a quorum is not met by it.
            assert run_snapshot(session, run.id, there, absent_are_gone=True).eligible == others
        client.set_run_state(run.id, "running")
        if others:
            assert second.take().round == 2
        else:
            assert first.take().round == 2
            assert [task.worker for task in client.round(run.id, 2).tasks] == ["a/first"]


def test_bounds_are_those_of_the_first_round_whoever_comes_later(standing: LiveCoordinator) -> None:
    client, run, taken = begun(standing, [("a", 10), ("b", 20), ("c", 30)], rounds=2)
    for worker, task in taken:
        worker.train(task)
    until(lambda: client.run(run.id).version.number == 1)
    dataset = run.spec.dataset
    for site in "defg":
        ScriptedWorker(standing.client("site", site), name=dataset, datasets={dataset: 1_000_000}).enrol()
    bounds = client.run(run.id).bounds
    assert bounds is not None
    assert (bounds.max_examples, bounds.max_norm_of_median) == (80, 10.0)
    told = [one.detail.get("bounds") for one in client.audit() if (one.action, one.run) == ("round.open", run.id)]
    assert told == [{"max_examples": 80, "max_norm_of_median": 10.0, "median_norm": 0.0}, None]
    settings = {"TESSERA_URL": standing.url, "TESSERA_TOKEN": standing.token("admin"), "COLUMNS": "160"}
    assert "at most 80 examples, 10 times the median norm" in tessera("run", "show", run.id, **settings).stdout


def test_a_site_whose_weight_is_limited_is_named_before_the_run_and_with_its_version(
    standing: LiveCoordinator,
) -> None:
    client, run, taken = begun(standing, [("a", 10), ("b", 10), ("c", 1000)])
    said = "max_examples limits the weight of a site to 40 examples, which c (1000) would exceed"
    assert any(warning.startswith(said) for warning in client.preview_run(run.spec).warnings)
    for worker, task in taken:
        worker.train(task)
    until(lambda: client.run(run.id).version.number == 1)
    first, made = client.versions(run.id)
    assert (len(first.warnings), [warning.startswith(said) for warning in made.warnings]) == (0, [True])


def test_an_orchestrator_sets_the_bounds_or_switches_them_off(standing: LiveCoordinator) -> None:
    unlimited = {"max_examples": "unlimited", "max_norm_of_median": "unlimited"}
    client, run, taken = begun(standing, [("a", 10), ("b", 10), ("c", 1000)], **unlimited)
    for (worker, task), step in zip(taken, (1.0, 1.0, 40.0), strict=True):
        worker.train(task, step)
    np.testing.assert_allclose(moved(client, run), (20 + 40_000) / 1020, rtol=1e-5)
    bounds = client.run(run.id).bounds
    assert bounds is not None
    assert (bounds.max_examples, bounds.max_norm_of_median) == (None, None)


def test_a_site_is_not_told_the_bounds_which_tell_of_other_sites(standing: LiveCoordinator) -> None:
    _, run, taken = begun(standing, [("a", 10), ("b", 20), ("c", 30)])
    assert taken[0][0].client.run(run.id).bounds is None


# Norms of two are compared no more than that of one.
@pytest.mark.parametrize("sites", variants(["a", "ab", "abcd"], short=["abcd"]))
def test_values_as_large_as_a_float_can_be_are_refused(standing: LiveCoordinator, sites: str) -> None:
    client, run, taken = begun(standing, [(site, 10) for site in sites])
    (worker, task), *others = taken
    absurd = worker.upload(task, {"head.weight": np.full_like(HEAD, 3.4e38)})
    with refusing("invalid-update") as caught:
        worker.submit(task, absurd)
    (fault,) = caught.value.errors
    assert (fault.pointer, fault.code) == ("head.weight", "too-far")
    for other, theirs in others:
        other.train(theirs, 1.0)
    if others:
        np.testing.assert_allclose(moved(client, run), 1.0, rtol=1e-5)
    else:
        client.set_run_state(run.id, "cancelled")
        assert client.run(run.id).version.number == 0


def test_one_is_warned_of_workers_of_a_site_that_hold_the_same_data(standing: LiveCoordinator) -> None:
    client, run, _ = begun(standing, [("a", 10), ("a", 10), ("b", 10)])
    (warning,) = client.preview_run(run.spec).warnings
    assert warning.startswith(f"several workers of a have a data set '{run.spec.dataset}'")
