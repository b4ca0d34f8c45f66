"""Runs with fitted work, and rounds that close by arrivals: what is planned, merged and refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.coordinator.operations.remerge import remerge
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.api.tasks import AdvertisedPolicy, Task
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import Invalid, InvalidUpdate, RoundClosed, TaskCancelled
from tessera.shared.run_settings import Privacy, Training
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, head_of, small_model, start_run, values

pytestmark = pytest.mark.both_databases(long="postgresql")

MODEL = small_model()
START = values(MODEL)
STEPS = 20
SECONDS = {"a": 10.0, "b": 20.0, "c": 60.0}
"""Of 20 steps at each site."""


@pytest.fixture
def live(tmp_path: Path, clock: Clock) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path, clock=clock, lease_seconds=3600, liveness_seconds=3600) as coordinator:
        yield coordinator


def sites(live: LiveCoordinator, **about: Any) -> dict[str, ScriptedWorker]:
    """Sites of 10, 20 and 30 examples."""
    return {
        name: ScriptedWorker(live.client("site", name), datasets={"data": 10 * place}, **about).enrol()
        for place, name in enumerate(SECONDS, 1)
    }


def fitted(live: LiveCoordinator, cohort: Mapping[str, Any] | None = None, **about: Any) -> Run:
    wanted = Cohort.model_validate({"size": 3, "quorum": 3, "work": "fitted", **(cohort or {})})
    training = about.pop("training", Training(steps=STEPS, optimizer="sgd"))
    return start_run(
        live.client(), MODEL, START, cohort=wanted, training=training, **{"rounds": 2, "keep_updates": "run", **about}
    )


def work(worker: ScriptedWorker, task: Task, step: float = 1.0) -> None:
    """Trains as many steps as the plan says, and `step` in each."""
    steps = task.plan.steps or STEPS
    worker.train(task, step=step * steps / STEPS, effective_steps=float(steps))


def a_round(
    live: LiveCoordinator, clock: Clock, run: Run, workers: Mapping[str, ScriptedWorker], step: float | None = None
) -> dict[str, Task]:
    """A round in which each site takes its own time for a step; returns its tasks by site."""
    tasks = {name: worker.take() for name, worker in workers.items()}
    number, began_at = tasks["a"].round, clock.at
    ends = {name: SECONDS[name] * (task.plan.steps or STEPS) / STEPS for name, task in tasks.items()}
    for name in sorted(tasks, key=ends.__getitem__):
        clock.advance(began_at + ends[name] - clock.at)
        work(workers[name], tasks[name], step=ord(name) - ord("a") if step is None else step)
    until(lambda: live.client().run(run.id).version.number == number)
    return tasks


def test_sites_make_steps_by_their_speed_which_are_merged_by_fednova_s_formula(
    live: LiveCoordinator, clock: Clock
) -> None:
    workers, run = sites(live), fitted(live)
    first = a_round(live, clock, run, workers)
    assert [task.plan.steps for task in first.values()] == [None] * 3
    # Steps of 0, 1 and 2 of sites with 10, 20 and 30 examples.
    np.testing.assert_allclose(head_of(live.client(), run), START["head.weight"] + 8 / 6, rtol=1e-6)

    second = a_round(live, clock, run, workers)
    # In the 20 s of the median site; c would make 6.7.
    made = {name: task.plan.steps or STEPS for name, task in second.items()}
    assert made == {"a": 40, "b": 20, "c": 7}
    effective = (10 * 40 + 20 * 20 + 30 * 7) / 60
    steps = sum(
        share / 6 * effective * sent / made[name]
        for name, share, sent in (("a", 1, 0.0), ("b", 2, 1.0), ("c", 3, 2 * 7 / STEPS))
    )
    np.testing.assert_allclose(head_of(live.client(), run), START["head.weight"] + 8 / 6 + steps, rtol=1e-6)
    assert remerge(live.services, run.id).same


def test_with_equal_speeds_the_versions_are_those_of_fixed_work(live: LiveCoordinator, clock: Clock) -> None:
    workers, digests = sites(live), []
    for cohort in ({"work": "fixed"}, {}):
        run = fitted(live, cohort, rounds=3)
        for number in range(1, 4):
            tasks = {name: worker.take() for name, worker in workers.items()}
            clock.advance(7.3)
            for name, task in tasks.items():
                assert task.plan.steps is None
                work(workers[name], task, step=0.1 * ord(name))
            until(lambda run=run, number=number: live.client().run(run.id).version.number == number)
        digests.append([version.digest for version in live.client().versions(run.id)])
    assert digests[0] == digests[1]


def test_drift_compares_steps_that_were_divided_by_their_number(live: LiveCoordinator, clock: Clock) -> None:
    workers, run = sites(live), fitted(live, signals={"drift": True})
    for _ in range(2):
        # Each step of each site is the same: one that makes more of them does not disagree with the others.
        tasks = a_round(live, clock, run, workers, step=1.0)
    assert [task.plan.steps for task in tasks.values()] == [40, None, 7]
    last = list(live.client().versions(run.id))[-1].scalars
    head = head_of(live.client(), run) - START["head.weight"] - 1
    assert last["drift.movement.head"] == pytest.approx(
        np.linalg.norm(head) / np.linalg.norm(START["head.weight"] + 1), rel=1e-5
    )
    assert last["drift.disagreement.head"] == pytest.approx(0, abs=1e-6)


def test_a_declared_speed_counts_until_one_is_measured(live: LiveCoordinator, clock: Clock) -> None:
    declared = {"a": 5.0, "b": 10.0}
    workers = sites(live)
    for name, seconds in declared.items():
        workers[name].resources = {"seconds_per_step": seconds}
        workers[name].enrol()
    run = fitted(live)
    first = a_round(live, clock, run, workers)
    # The median of the two that declare a speed: 150 s.
    assert {name: task.plan.steps for name, task in first.items()} == {"a": 30, "b": 15, "c": None}
    second = a_round(live, clock, run, workers)
    assert {name: task.plan.steps for name, task in second.items()} == {"a": 40, "b": None, "c": 7}


def test_under_privacy_no_time_of_a_task_counts(live: LiveCoordinator, clock: Clock) -> None:
    workers, privacy = sites(live), Privacy(epsilon=4, delta=1e-5, clip_norm=1)
    run = fitted(live, privacy=privacy)
    for _ in range(2):
        assert [task.plan.steps for task in a_round(live, clock, run, workers).values()] == [None] * 3
    until(lambda: live.client().run(run.id).state == "completed")
    workers["a"].resources, workers["c"].resources = {"seconds_per_step": 2.0}, {"seconds_per_step": 1.0}
    for name in "ac":
        workers[name].enrol()
    run = fitted(live, privacy=privacy)
    for _ in range(2):
        # Of 40 s and 20 s, whatever the clock says.
        assert [task.plan.steps for task in a_round(live, clock, run, workers).values()] == [15, None, 30]


def test_a_plan_keeps_to_its_site_s_policy(live: LiveCoordinator, clock: Clock) -> None:
    workers = sites(live, advertised_policy=AdvertisedPolicy(max_epochs=25))
    workers["c"].advertised_policy = AdvertisedPolicy(min_batch=64)
    workers["c"].enrol()
    run = fitted(live, training=Training(steps=STEPS, optimizer="sgd", batch_size=2))
    a_round(live, clock, run, workers)
    steps = {name: task.plan.steps for name, task in a_round(live, clock, run, workers).items()}
    # 25 epochs of 5 batches are no limit to a; c's policy wants a pass over its 30 examples, and 7 steps are none.
    assert steps == {"a": 40, "b": None, "c": None}


@pytest.mark.parametrize(
    ("method", "most"),
    [
        # Each model of Ditto's has half of the 10 epochs, of 5 batches; FedRep's head has one.
        (MethodSpec(name="ditto"), 25),
        (MethodSpec(name="ditto", settings={"own_epochs": 3}), 35),
        (MethodSpec(name="fedrep"), None),
        (MethodSpec(name="fedrep", settings={"head_epochs": 4}), 30),
    ],
)
def test_all_phases_together_keep_to_the_site_s_policy(
    live: LiveCoordinator, clock: Clock, method: MethodSpec, most: int | None
) -> None:
    workers = sites(live, advertised_policy=AdvertisedPolicy(max_epochs=10), methods=(method.name,))
    run = fitted(live, method=method, training=Training(steps=STEPS, optimizer="sgd", batch_size=2))
    a_round(live, clock, run, workers)
    assert workers["a"].take().plan.steps == (most or 40)


def test_a_site_s_groups_are_not_trained_for_more_epochs_than_usual(live: LiveCoordinator) -> None:
    # How many steps an epoch over groups has, and with it how many the policy permits, only the site knows.
    about = {"advertised_policy": AdvertisedPolicy(max_epochs=100), "resources": {"seconds_per_step": 1.0}}
    workers = sites(live, **about)
    workers["c"].resources = {"seconds_per_step": 2.0}
    workers["c"].enrol()
    privacy = Privacy(unit="group", epsilon=4, delta=1e-5, clip_norm=1)
    fitted(live, privacy=privacy, training=Training(steps=STEPS, optimizer="sgd", batch_size=2))
    assert {name: worker.take().plan.steps for name, worker in workers.items()} == {"a": None, "b": None, "c": 10}


def test_an_update_of_other_work_than_planned_is_refused(live: LiveCoordinator, clock: Clock) -> None:
    workers, run = sites(live), fitted(live)
    a_round(live, clock, run, workers)
    task = workers["a"].take()
    for reported in ({"effective_steps": 20.0}, {}):
        with pytest.raises(InvalidUpdate) as refusal:
            workers["a"].train(task, **reported)
        assert "10 examples make it 40" in refusal.value.errors[0].detail


def test_buffered_sites_make_steps_by_their_speed(live: LiveCoordinator, clock: Clock) -> None:
    workers = sites(live)
    run = fitted(live, {"mode": "buffer", "size": None, "quorum": 1, "target_updates": 2}, rounds=5)
    slow = workers["c"].take()
    for number, steps in ((1, {"a": None, "b": None}), (2, {"a": 30, "b": 15})):
        for name, seconds in (("a", 10.0), ("b", 10.0)):
            task = workers[name].take()
            assert task.plan.steps == steps[name]
            clock.advance(seconds)
            work(workers[name], task)
        until(lambda number=number: live.client().run(run.id).version.number == number)
    work(workers["c"], slow)
    work(workers["a"], workers["a"].take())
    until(lambda: live.client().run(run.id).version.number == 3)
    # It took the 40 s of both rounds. The median of b's 20 s for 20 and for 15 steps is 23.3 s for 20.
    assert workers["c"].take().plan.steps == 12
    assert remerge(live.services, run.id).same


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"method": {"name": "scaffold"}}, "its proof is for equal numbers of steps"),
        ({"method": {"name": "feddyn"}}, "its proof is for equal numbers of steps"),
        (
            {"training": {"steps": 20, "optimizer": "sgd", "momentum": 0.9, "keep_moments": True}},
            "counts a site's momentum from zero",
        ),
    ],
)
def test_what_would_be_merged_wrongly_is_refused_with_a_remedy(
    standing: LiveCoordinator, about: dict[str, Any], said: str
) -> None:
    with pytest.raises(Invalid) as refusal:
        fitted(standing, **about)
    assert said in refusal.value.errors[0].detail
    remedies = ('set cohort.work to "fixed"', "leave training.keep_moments out")
    assert any(remedy in refusal.value.errors[0].detail for remedy in remedies)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"cohort": {"workers_per_site": 2}}, "cohort.workers_per_site: a site's updates are pooled"),
        (
            {
                "privacy": {"unit": "group", "epsilon": 4, "delta": 1e-5, "clip_norm": 1},
                "training": {"epochs": 2, "optimizer": "sgd"},
            },
            "privacy.unit: only the site knows the number of groups",
        ),
        (
            {"client_privacy": {"delta": 1e-5, "clip_norm": 1.0, "epsilon": 4}},
            "client_privacy: a step that was divided",
        ),
        ({"secure_sums": {"helpers": ["a", "b", "c"]}}, "secure_sums: the plan of a sum"),
    ],
)
def test_settings_for_equal_numbers_of_steps_are_refused(
    standing: LiveCoordinator, about: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match="set work to 'fixed'") as refusal:
        fitted(standing, keep_updates="round", **about)
    assert said in str(refusal.value)


# ---------------------------------------------------------------- rounds that close by arrivals


def test_a_round_closes_once_the_others_take_longer_than_usual(live: LiveCoordinator, clock: Clock) -> None:
    workers = sites(live)
    run = fitted(live, {"work": "fixed", "quorum": 2, "adaptive_deadline": True, "deadline_seconds": 3600})
    client = live.client()
    tasks = {name: worker.take() for name, worker in workers.items()}
    clock.advance(10)
    work(workers["a"], tasks["a"])
    clock.advance(2)
    work(workers["b"], tasks["b"])
    # The median of 10, 12 and a longer time is 12, their deviations are 2, 0 and a longer one.
    clock.advance(5.9)
    live.services.wake_conductor(run.id)
    assert workers["c"].client.heartbeat(tasks["c"].id, tasks["c"].token)
    assert client.run(run.id).version.number == 0
    clock.advance(0.1)
    until(lambda: client.run(run.id).version.number == 1)
    assert next(iter(client.rounds(run.id))).reason == "the other sites take longer than usual"
    with pytest.raises((TaskCancelled, RoundClosed)):
        work(workers["c"], tasks["c"])


def test_over_selection_asks_more_sites_than_it_waits_for(live: LiveCoordinator) -> None:
    workers = sites(live)
    run = fitted(live, {"work": "fixed", "size": 2, "quorum": 2, "over_selection": 0.3})
    assert (workers["a"].take().cohort.size, workers["a"].take().cohort.target_updates) == (3, 2)
    for name in "ac":
        work(workers[name], workers[name].take())
    until(lambda: live.client().run(run.id).version.number == 1)
    states = {task.worker: task.state for task in next(iter(live.client().rounds(run.id))).tasks}
    assert states == {"a/w": "merged", "b/w": "cancelled", "c/w": "merged"}
