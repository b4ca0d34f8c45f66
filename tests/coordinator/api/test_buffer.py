"""Runs that make a version of the first updates to come, whichever versions these started from."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.coordinator.operations.remerge import remerge
from tessera.shared.aggregation.server_optimizer import Momentum
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunPatch
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import Gone, Invalid, RoundClosed, TaskCancelled
from tessera.shared.run_settings import ClientPrivacy
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, exported, head_of, small_model, start_run, values

pytestmark = pytest.mark.both_databases(long="postgresql")

MODEL = small_model()
START = values(MODEL)


def sites(coordinator: LiveCoordinator, *names: str, **about: Any) -> list[ScriptedWorker]:
    return [ScriptedWorker(coordinator.client("site", name), **about).enrol() for name in names]


def buffered(
    client: Client,
    *,
    updates: int = 2,
    rounds: int = 9,
    method: Any = None,
    evaluation: Evaluation | None = None,
    **cohort: Any,
) -> Run:
    wanted = Cohort(mode="buffer", target_updates=updates, quorum=cohort.pop("quorum", updates), **cohort)
    chosen = {"method": method} if method else {}
    about = {"rounds": rounds, "keep_updates": "run", "evaluation": evaluation}
    return start_run(client, MODEL, START, cohort=wanted, **about, **chosen)


def reach(client: Client, run: Run, number: int) -> None:
    until(lambda: client.run(run.id).version.number == number)


def states(client: Client, run: Run, worker: str) -> list[str]:
    """The states of a worker's tasks, oldest first."""
    return [task.state for round_ in client.rounds(run.id) for task in round_.tasks if task.worker == worker]


def test_fast_sites_go_on_and_a_late_update_weighs_less(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b, slow = sites(coordinator, "a", "b", "slow")
    run = buffered(client)
    late = slow.take()
    for number in (1, 2):
        for worker in (a, b):
            task = worker.take()
            assert task.version.number == number - 1
            worker.train(task)
        reach(client, run, number)
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 2, rtol=1e-6)

    slow.train(late)
    a.train(a.take())
    reach(client, run, 3)
    # Two versions have changed every block since: only the late step is damped, and not the sum of weights.
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 2 + (1 + 1 / sqrt(3)) / 2, rtol=1e-6)
    again = slow.take()
    assert (again.version.number, again.receipt and again.receipt.state) == (3, "merged")
    # b was asked in round 3, and began nothing.
    until(lambda: states(client, run, "b/w") == ["merged", "merged", "cancelled", "offered"])
    assert remerge(coordinator.services, run.id).same


def test_with_equal_speeds_the_versions_are_those_of_a_barrier(coordinator: LiveCoordinator) -> None:
    client, names = coordinator.client(), "abc"
    workers = [
        ScriptedWorker(coordinator.client("site", name), datasets={"data": 5 + place}).enrol()
        for place, name in enumerate(names)
    ]
    digests = []
    for cohort in (Cohort(size=3, quorum=3), Cohort(mode="buffer", target_updates=3, quorum=3)):
        run = start_run(client, MODEL, START, rounds=3, cohort=cohort)
        for _ in range(3):
            for step, worker in enumerate(workers):
                worker.train(worker.take(), step=0.1 * step)
        until(lambda run=run: client.run(run.id).state == "completed")
        digests.append([version.digest for version in client.versions(run.id)])
    assert digests[0] == digests[1]


def test_a_task_that_grew_too_old_is_cancelled_and_its_worker_told(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, slow = sites(coordinator, "a", "slow")
    run = buffered(client, updates=1, max_staleness=1)
    old = slow.take()
    for number in (1, 2):
        a.train(a.take())
        reach(client, run, number)
    with pytest.raises(TaskCancelled, match=r"more than 1 versions were made since its own \(cohort.max_staleness\)"):
        slow.client.heartbeat(old.id, old.token)
    with pytest.raises(TaskCancelled):
        slow.train(old)
    assert slow.take().version.number == 2


def test_a_task_that_nobody_began_is_planned_anew(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, _ = sites(coordinator, "a", "away")
    run = buffered(client, updates=1)
    for number in (1, 2, 3):
        a.train(a.take())
        reach(client, run, number)
    assert ScriptedWorker(coordinator.client("site", "away")).take().version.number == 3


def test_a_late_update_changes_no_frozen_block(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, slow = sites(coordinator, "a", "slow")
    frozen = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "scope": "v_head"})
    run = buffered(client, updates=1, method=frozen)
    late = slow.take()
    assert late.plan.stage == "warm-up"
    a.train(a.take())
    reach(client, run, 1)
    a.take()
    slow.train(late)
    reach(client, run, 2)
    blocks = [client.manifest(version.digest).blocks for version in client.versions(run.id)]
    moving = {"layer.0.qkv.weight#value", "head.weight"}
    assert {name for name in blocks[2] if blocks[2][name] != blocks[1][name]} == moving
    merged = next(task for task in next(iter(client.rounds(run.id))).tasks if task.worker == "slow/w")
    assert merged.state == "merged"
    assert set(merged.unmerged) == set(MODEL.by_name) - moving


def test_a_site_whose_task_failed_is_asked_on_the_next_version(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b = sites(coordinator, "a", "b")
    run = buffered(client, updates=1)
    b.fail(b.take())
    assert b.claim(0) is None
    a.train(a.take())
    reach(client, run, 1)
    assert b.take().version.number == 1


def test_a_site_that_comes_while_a_round_is_open_is_asked_at_once(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, c = sites(coordinator, "a", "c")
    run = buffered(client, updates=3, quorum=2)
    a.train(a.take())
    held = c.take()
    (b,) = sites(coordinator, "b")
    b.train(b.take())
    c.train(held)
    reach(client, run, 1)
    entries = [entry.action for entry in client.audit() if entry.action.startswith("round.")]
    assert entries[:3] == ["round.open", "round.ask", "round.close"]


def test_as_many_sites_are_at_work_as_the_cohort_has(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    workers = sites(coordinator, "a", "b", "c")
    run = buffered(client, updates=1, size=2)
    busy = [worker for worker in workers if worker.claim(1)]
    assert len(busy) == 2
    (idle,) = (worker for worker in workers if worker not in busy)
    busy[0].train(busy[0].take())
    reach(client, run, 1)
    until(lambda: sum(t.state in ("offered", "leased") for r in client.rounds(run.id) for t in r.tasks) == 2)
    assert busy[1].take().version.number == 0
    assert idle.client is not busy[0].client


def test_an_absent_worker_keeps_no_other_of_its_site_from_a_task(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, lease_seconds=60, liveness_seconds=90) as live:
        client, (b,) = live.client(), sites(live, "b")
        pair = [ScriptedWorker(live.client("site", "a"), name).enrol() for name in ("one", "two")]
        run = buffered(client, max_attempts=100)
        (gone,) = (worker for worker in pair if worker.claim(1))
        (other,) = (worker for worker in pair if worker is not gone)
        b.train(b.take())
        live.elapse(400, other, b)
        other.train(other.take())
        reach(client, run, 1)
        tasks = [task for round_ in client.rounds(run.id) for task in round_.tasks if round_.number == 1]
        ended = {task.worker: task.state for task in tasks}
        assert ended == {f"a/{gone.name}": "cancelled", f"a/{other.name}": "merged", "b/w": "merged"}


def test_a_slow_site_measures_the_last_version_and_none_while_it_trains(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    about: Any = {"kinds": ("train", "evaluate"), "held_out": {"data": 4}}
    a, slow = sites(coordinator, "a", "slow", **about)
    run = buffered(client, updates=1, rounds=3, evaluation=Evaluation(sites=True))
    for worker in (slow, a):
        worker.evaluate(worker.take(), loss=1.0)
    held = slow.take()
    for number in (1, 2, 3):
        a.train(a.take())
        reach(client, run, number)
        a.evaluate(a.take(), loss=0.5)
        if number < 3:
            (found,) = (one for one in client.coverage(run.id) if one.site == "slow")
            assert (found.missed, found.reason) == (number, "it is at work, from version 0 on")
    with pytest.raises(RoundClosed):
        slow.client.heartbeat(held.id, held.token)
    last = slow.take()
    slow.evaluate(last, loss=0.5)
    until(lambda: client.run(run.id).state == "completed")
    measured = [(one.site, one.version) for one in client.measurements(run.id) if one.site == "slow"]
    assert (last.kind, measured) == ("evaluate", [("slow", 0), ("slow", 3)])


def test_a_site_that_is_slow_to_measure_trains_all_the_same(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    about: Any = {"kinds": ("train", "evaluate"), "held_out": {"data": 4}}
    a, slow = sites(coordinator, "a", "slow", **about)
    run = buffered(client, updates=1, evaluation=Evaluation(sites=True))
    first = slow.take()
    a.evaluate(a.take(), loss=1.0)
    for number in (1, 2):
        a.train(a.take())
        reach(client, run, number)
        a.evaluate(a.take(), loss=0.5)
    # It has its own once the round is open, in which both are asked.
    a.take()
    slow.evaluate(first, loss=1.0)
    began = slow.take()
    assert (first.kind, began.kind, began.version.number) == ("evaluate", "train", 2)


def test_what_a_late_update_started_from_is_needed_to_merge_again(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, keep_versions=3) as live:
        client = live.client()
        first, b, slow = sites(live, "a", "b", "slow")
        run = buffered(client, updates=1)
        b.train(b.take())
        reach(client, run, 1)
        late = slow.take()
        for number, worker in enumerate((b, b, first), 2):
            worker.train(worker.take())
            reach(client, run, number)
        slow.train(late)
        reach(client, run, 5)
        assert late.version.number == 1
        live.services.retention.collect()
        with pytest.raises(Gone, match="versions 1 are no longer kept"):
            remerge(live.services, run.id, "a")


@pytest.mark.parametrize("is_merging", [False, True])
def test_a_site_that_withdraws_leaves_the_buffer(coordinator: LiveCoordinator, is_merging: bool) -> None:
    client = coordinator.client()
    a, b, slow = sites(coordinator, "a", "b", "slow")
    run = buffered(client)
    late = slow.take()
    for worker in (a, b):
        worker.train(worker.take())
    reach(client, run, 1)
    (site,) = (one for one in client.sites() if one.name == "slow")
    if is_merging:
        with coordinator.services.conductor._merging:
            slow.train(late)
            a.train(a.take())
            until(lambda: client.round(run.id, 2).state == "merging")
            client.withdraw_site(site.id)
    else:
        slow.train(late)
        client.withdraw_site(site.id)
        a.train(a.take())
    b.train(b.take())
    reach(client, run, 2)
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 2, rtol=1e-6)
    ended = [task.state for round_ in client.rounds(run.id) for task in round_.tasks]
    assert (ended.count("merged"), ended.count("left_out")) == (4, 1)


@pytest.mark.parametrize("ends", ["completed", "cancelled"])
def test_what_is_left_when_a_run_ends_is_left_out(coordinator: LiveCoordinator, ends: str) -> None:
    client = coordinator.client()
    a, b, slow = sites(coordinator, "a", "b", "slow")
    run = buffered(client, rounds=1)
    held = slow.take()
    a.train(a.take())
    if ends == "cancelled":
        client.patch_run(run.id, RunPatch(state="cancelled"))
    else:
        b.train(b.take())
    until(lambda: client.run(run.id).state == ends)
    until(lambda: states(client, run, "slow/w") == ["cancelled"])
    assert states(client, run, "a/w") == ["merged" if ends == "completed" else "left_out"]
    with pytest.raises(TaskCancelled if ends == "cancelled" else RoundClosed):
        slow.client.heartbeat(held.id, held.token)


def reason_of(client: Client, run: Run, site: str) -> str:
    return next(one.reason for one in client.coverage(run.id) if one.site == site)


def test_an_update_that_comes_while_the_last_version_is_merged_is_left_out_with_a_reason(
    coordinator: LiveCoordinator,
) -> None:
    client = coordinator.client()
    a, b, slow = sites(coordinator, "a", "b", "slow")
    run = buffered(client, rounds=1)
    late = slow.take()
    with coordinator.services.conductor._merging:
        for worker in (a, b):
            worker.train(worker.take())
        until(lambda: client.round(run.id, 1).state == "merging")
        slow.train(late)
    until(lambda: client.run(run.id).state == "completed")
    assert states(client, run, "slow/w") == ["left_out"]
    assert reason_of(client, run, "slow") == "its update came too late for the last version, or its site withdrew"


def test_a_late_update_of_too_large_a_norm_is_left_out_with_a_reason(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b, c, slow = sites(coordinator, "a", "b", "c", "slow")
    run = buffered(client, updates=3)
    late = slow.take()
    for worker in (a, b, c):
        worker.train(worker.take(), update_norm=1.0)
    reach(client, run, 1)
    for worker in (a, b):
        worker.train(worker.take(), update_norm=1.0)
    slow.train(late, step=100.0, update_norm=100.0)
    reach(client, run, 2)
    # It is asked again, in the round before or in the next.
    until(lambda: states(client, run, "slow/w") == ["left_out", "offered"])
    assert reason_of(client, run, "slow") == "its update was left out: its norm is too large"
    np.testing.assert_allclose(head_of(client, run), START["head.weight"] + 2, rtol=1e-6)


UNFIT = {
    "scaffold": ({"method": MethodSpec(name="scaffold")}, "cohort.mode to barrier"),
    "consensus": (
        {"method": MethodSpec(name="safl", settings={"chooser": "consensus", "score": "attention"})},
        "cohort.mode to barrier",
    ),
    "automatic warm-up": (
        {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"}), "rounds": 20},
        "cohort.mode to barrier",
    ),
    "optimizer": ({"server_optimizer": Momentum(momentum=0.9)}, "server_optimizer: its memory"),
    "client privacy": (
        {
            "client_privacy": ClientPrivacy(epsilon=8, clip_norm=1, delta=1e-3, expected_sites=5),
            "normalization": "cohort",
        },
        "client_privacy: its noise",
    ),
    "probabilities": ({"normalization": "inverse-probability"}, "normalization: a site"),
}


@pytest.mark.parametrize("setting", UNFIT)
def test_what_needs_one_version_for_all_refuses_a_buffer(standing: LiveCoordinator, setting: str) -> None:
    spec, said = UNFIT[setting]
    with pytest.raises((Invalid, ValueError), match=said):
        start_run(standing.client(), MODEL, START, cohort=Cohort(mode="buffer", quorum=2), **spec)


def test_settings_of_a_buffer_have_no_effect_behind_a_barrier(standing: LiveCoordinator) -> None:
    with pytest.raises(Invalid) as refused:
        start_run(standing.client(), MODEL, START, cohort=Cohort(max_staleness=3))
    assert refused.value.errors[0].detail == 'has no effect here: leave it out, or set mode to "buffer"'


def test_an_exported_model_is_that_of_the_last_version(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    (a,) = sites(coordinator, "a")
    run = buffered(client, updates=1, rounds=1)
    a.train(a.take(), step=0.5)
    until(lambda: client.run(run.id).state == "completed")
    np.testing.assert_allclose(exported(client, run)["head.weight"], START["head.weight"] + 0.5, rtol=1e-6)


def test_a_refusal_names_the_setting_with_which_the_method_goes(standing: LiveCoordinator) -> None:
    cohort = Cohort(mode="buffer", quorum=2)
    unfit = MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"})
    with pytest.raises(Invalid) as refused:
        start_run(standing.client(), MODEL, START, cohort=cohort, method=unfit, rounds=20)
    said = "set warmup_rounds of a number and signals = false, or set cohort.mode to barrier"
    assert said in refused.value.errors[0].detail
    fit = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 5})
    assert start_run(standing.client(), MODEL, START, cohort=cohort, method=fit, rounds=20).state == "running"


def test_a_run_whose_sites_have_all_done_their_share_pauses_and_says_so(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b, slow = sites(coordinator, "a", "b", "slow")
    run = buffered(client, max_updates_per_site=2, quorum=1)
    late = slow.take()
    for number in (1, 2):
        for worker in (a, b):
            task = worker.take()
            assert (task.cohort.mode, task.trainings) == ("buffer", 2)
            worker.train(task)
        reach(client, run, number)
    # Both have trained twice: the slow site is asked alone.
    assert a.claim(0) is None
    assert {one.reason for one in client.coverage(run.id) if one.site == "slow"} == {
        "it is at work, from version 0 on"
    }
    assert b.claim(0) is None
    slow.train(late)
    reach(client, run, 3)
    slow.train(slow.take())
    reach(client, run, 4)
    until(lambda: client.run(run.id).state == "paused")
    reasons = {one.reason for one in client.coverage(run.id) if one.site == "a"}
    assert reasons == {"it has trained as often as cohort.max_updates_per_site allows, 2 times"}
    assert client.run(run.id).reason == (
        "3 sites have trained from 2 versions, as many as cohort.max_updates_per_site allows, and 0 others can take "
        "part, while the quorum is 1: resume the run when other sites are here, or cancel it, and its versions stay"
    )
    trained = [t.worker for r in client.rounds(run.id) for t in r.tasks if t.state == "merged"]
    assert {worker: trained.count(worker) for worker in trained} == {"a/w": 2, "b/w": 2, "slow/w": 2}
    (fourth,) = sites(coordinator, "new")
    client.patch_run(run.id, RunPatch(state="running"))
    fourth.train(fourth.take())
    reach(client, run, 5)


def test_a_cap_holds_behind_a_barrier_too(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    a, b = sites(coordinator, "a", "b")
    run = start_run(client, MODEL, START, rounds=9, cohort=Cohort(quorum=2, max_updates_per_site=1))
    for worker in (a, b):
        worker.train(worker.take())
    until(lambda: client.run(run.id).state == "paused")
    assert "as cohort.max_updates_per_site allows" in (client.run(run.id).reason or "")
    assert client.run(run.id).version.number == 1


def test_a_run_waits_for_sites_that_are_away_although_another_has_done_its_share(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, lease_seconds=60, liveness_seconds=90) as live:
        client, (a, b, c) = live.client(), sites(live, "a", "b", "c")
        run = buffered(client, max_updates_per_site=2, max_attempts=100)
        for number, other in ((1, b), (2, c)):
            for worker in (a, other):
                worker.train(worker.take())
            reach(client, run, number)
        live.elapse(400, a)
        assert (a.claim(0), client.run(run.id).state) == (None, "running")
        for worker in (b, c):
            worker.enrol()
        for worker in (b, c):
            worker.train(worker.take())
        reach(client, run, 3)
