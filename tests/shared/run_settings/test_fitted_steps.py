"""How many steps each worker makes in a round of fitted work."""

from __future__ import annotations

import pytest

from tessera.shared.run_settings import Training
from tessera.shared.schedule import Pace, fitted_steps, local_steps, step_range

STEPS = Training(steps=20)
EXAMPLES = {"a": 10, "b": 10, "c": 10}


def test_all_finish_with_the_median_worker() -> None:
    paces = {"a": Pace(1.0), "b": Pace(2.0), "c": Pace(8.0)}
    # b takes 40 s.
    assert fitted_steps(STEPS, EXAMPLES, paces, 4.0) == {"a": 40, "b": 20, "c": 5}


def test_the_fixed_time_of_a_task_is_no_time_for_steps() -> None:
    paces = {"a": Pace(1.0, fixed_seconds=10.0), "b": Pace(2.0, fixed_seconds=2.0), "c": Pace(4.0, fixed_seconds=2.0)}
    # b takes 42 s.
    assert fitted_steps(STEPS, EXAMPLES, paces, 4.0) == {"a": 32, "b": 20, "c": 10}


def test_a_worker_makes_no_more_and_no_fewer_than_the_factor_allows() -> None:
    paces = {"a": Pace(1e-9), "b": Pace(1.0), "c": Pace(1.0, fixed_seconds=1000.0)}
    assert fitted_steps(STEPS, EXAMPLES, paces, 3.0) == {"a": 60, "b": 20, "c": 7}
    assert step_range(STEPS, 10, 3.0) == (7, 60)
    assert step_range(Training(steps=1), 10, 3.0) == (1, 3)
    assert step_range(Training(steps=1_000_000), 10, 3.0) == (333_334, 1_000_000)
    # As many steps of an epoch as no plan may have: the worker makes the epoch.
    assert step_range(Training(batch_size=1), 3_000_000, 2.0)[1] == 3_000_000


def test_of_epochs_each_site_s_own_number_of_batches_counts() -> None:
    training = Training(epochs=2, batch_size=5)
    examples = {"a": 10, "b": 20, "c": 40}
    assert [local_steps(training, count) for count in examples.values()] == [4, 8, 16]
    paces = dict.fromkeys(examples, Pace(1.0))
    assert fitted_steps(training, examples, paces, 4.0) == {"a": 8, "b": 8, "c": 8}


@pytest.mark.parametrize("seconds", [1.0, 0.1, 1 / 3, 1e-7, 12345.678])
@pytest.mark.parametrize("fixed", [0.0, 0.7, 1e6])
def test_equal_paces_change_nothing(seconds: float, fixed: float) -> None:
    paces = dict.fromkeys(EXAMPLES, Pace(seconds, fixed))
    assert fitted_steps(Training(steps=17), EXAMPLES, paces, 4.0) == dict.fromkeys(EXAMPLES, 17)


def test_a_worker_of_unknown_pace_makes_the_run_s_steps() -> None:
    assert fitted_steps(STEPS, EXAMPLES, {}, 4.0) == dict.fromkeys(EXAMPLES, 20)
    assert fitted_steps(STEPS, EXAMPLES, {"a": Pace(3.0)}, 4.0) == dict.fromkeys(EXAMPLES, 20)
    # 60 s are between 40 and 80 of a and c.
    assert fitted_steps(STEPS, EXAMPLES, {"a": Pace(2.0), "c": Pace(4.0)}, 4.0) == {"a": 30, "b": 20, "c": 15}
