"""Test simulated time: durations by speed, line and absence, and buffered rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.shared.model.spec import Model
from tessera.simulation import Conditions, Result, Weights, simulate
from tessera.worker.model.build import instantiate
from tests.simulation.test_simulation import DROPOUT, images
from tests.support.coordinator import refusing

NAMES = ("a", "b", "c", "d")
SITES = {name: images(seed) for seed, name in enumerate(NAMES)}
FIVE_STEPS = {"batch_size": 8, "learning_rate": 0.05, "steps": 5, "optimizer": "sgd"}
ONE_TO_TEN = {"geometric": (1.0, 10.0)}
BUFFER = {"mode": "buffer", "target_updates": 2}


@pytest.fixture(scope="module")
def model() -> Weights:
    return Weights.of(instantiate(DROPOUT, "image-classification", seed=1), DROPOUT, "image-classification")


def run(model: Weights, out: Path | None = None, until: int | None = None, **more: Any) -> Result:
    spec = {"method": {"name": "fedavg"}, "training": FIVE_STEPS, "rounds": more.pop("rounds", 2)}
    spec |= {"cohort": more.pop("cohort", {}), "codec": more.pop("codec", "raw")}
    return simulate(spec, model, SITES, conditions=Conditions.model_validate(more), out=out, until=until)


def digests(result: Result) -> list[str]:
    return [version.digest for version in result.versions]


def test_a_round_lasts_as_long_as_its_slowest_site(model: Weights) -> None:
    # The slowest of four sites takes 10 s for each of its 5 steps.
    slow = run(model, speed=ONE_TO_TEN)
    assert slow.simulated_seconds == {0: 0.0, 1: 50.0, 2: 100.0}
    # Without profiles every training takes a second, and the versions are the same.
    assert run(model).simulated_seconds == {0: 0.0, 1: 1.0, 2: 2.0}
    assert digests(run(model)) == digests(slow)


def bytes_of(document: Model) -> int:
    return sum(block.nbytes for block in document.blocks)


def test_a_line_takes_time_for_each_byte(model: Weights) -> None:
    result = run(model, rounds=1, speed=1.0, line={"up": 1000.0, "down": 4000.0})
    (task, *_) = result.rounds[0].tasks
    assert task.download_bytes >= bytes_of(model.model)
    seconds = 5 + task.download_bytes / 4000 + task.upload_bytes / 1000
    assert result.simulated_seconds[1] == pytest.approx(seconds, abs=0.01)


def test_a_site_that_is_absent_takes_no_task_until_it_is_back(model: Weights) -> None:
    result = run(model, rounds=3, speed=1.0, absence={"b": ((4.0, 7.0),)})
    asked = [[task.worker.partition("/")[0] for task in made.tasks] for made in result.rounds]
    # The second round opens after 5 s, the third after 10 s.
    assert asked == [list(NAMES), ["a", "c", "d"], list(NAMES)]
    # If all that the quorum needs are absent, the round waits for them.
    waits = run(model, rounds=2, speed=1.0, cohort={"quorum": 4}, absence={"b": ((4.0, 7.0),)})
    assert waits.simulated_seconds == {0: 0.0, 1: 5.0, 2: 12.0}


def test_sites_miss_rounds_at_random_and_jitter_changes_times_as_the_seed_has_them(model: Weights) -> None:
    there = [run(model, rounds=4, absence=0.5, jitter=0.5, speed=1.0) for _ in range(2)]
    assert there[0].simulated_seconds == there[1].simulated_seconds
    assert there[0].simulated_seconds[4] != 20.0
    assert {len(made.tasks) for made in there[0].rounds} != {4}
    assert digests(there[0]) == digests(there[1])


def test_a_buffer_of_all_with_equal_speeds_makes_the_versions_of_the_barrier(model: Weights) -> None:
    barrier, buffer = run(model), run(model, cohort={"mode": "buffer", "target_updates": 4})
    assert digests(buffer) == digests(barrier)


def test_a_buffer_makes_more_versions_in_the_time_in_which_a_barrier_waits_for_the_slowest(model: Weights) -> None:
    barrier = run(model, speed=ONE_TO_TEN)
    buffer = run(model, rounds=8, cohort=BUFFER, speed=ONE_TO_TEN)
    until = barrier.simulated_seconds[2]
    assert sum(seconds <= until for seconds in buffer.simulated_seconds.values()) > 2 * len(barrier.versions)
    merged = {
        task.worker.partition("/")[0] for made in buffer.rounds for task in made.tasks if task.state == "merged"
    }
    assert merged >= set(NAMES[:3])


@pytest.mark.parametrize(
    ("stops", "cohort"), [((1,), BUFFER), ((3, 5), {**BUFFER, "staleness": "none", "memory": True})]
)
def test_a_buffer_that_was_stopped_goes_on_with_the_same_bits_in_several_processes(
    model: Weights, tmp_path: Path, stops: tuple[int, ...], cohort: dict[str, Any]
) -> None:
    profile: dict[str, Any] = {"speed": ONE_TO_TEN, "line": 20_000.0, "jitter": 0.3, "threads": 1, "rounds": 6}
    whole = run(model, cohort=cohort, **profile)
    for until in stops:
        run(model, out=tmp_path, until=until, cohort=cohort, processes=2, **profile)
    resumed = run(model, out=tmp_path, cohort=cohort, **profile)
    assert digests(resumed) == digests(whole)
    assert resumed.simulated_seconds == whole.simulated_seconds


def test_a_profile_of_an_unknown_site_and_a_speed_of_zero_are_refused(model: Weights) -> None:
    with refusing("invalid", "speed: there is no site 'e'"):
        run(model, speed={"e": 1.0})
    with pytest.raises(ValidationError, match="speed"):
        Conditions.model_validate({"speed": 0.0})


def test_fitted_work_ends_at_all_sites_together_once_their_speeds_are_known(model: Weights) -> None:
    result = run(model, rounds=3, cohort={"work": "fitted", "work_factor": 10.0}, speed=ONE_TO_TEN)
    seconds = result.simulated_seconds
    first, later = seconds[1], [seconds[number] - seconds[number - 1] for number in (2, 3)]
    assert first == 50.0
    assert all(16 < took < 24 for took in later)
    steps = {task.worker: task.metrics["effective_steps"] for task in result.rounds[-1].tasks}
    assert [*steps.values()] == [17.0, 8.0, 4.0, 2.0]


def test_a_buffer_measures_its_versions_also_where_workers_fall_silent(model: Weights) -> None:
    sites = {name: images(seed, 8, held_out=2) for seed, name in enumerate(NAMES)}
    spec = {"method": {"name": "fedavg"}, "training": FIVE_STEPS, "rounds": 12, "cohort": BUFFER}
    spec |= {"evaluation": {"sites": True, "every": 2}}
    conditions = Conditions.model_validate(
        {"speed": ONE_TO_TEN, "jitter": 0.4, "dropout": 0.3, "policy": {"min_evaluation_examples": 1}}
    )
    # A silent worker is back when its lease ends. It is offered its task again, and is then too busy to measure.
    result = simulate(spec, model, sites, conditions=conditions)
    assert result.over
    assert max(one.version for one in result.measurements) == 12
