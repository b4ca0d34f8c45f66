"""The length of a round, and the schedule of the learning rate over a run."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler

from tessera.shared.run_settings import MAX_STEPS, Augmentation, Training
from tessera.shared.schedule import full_rate_steps, local_epochs, local_steps, rate_factors, require_summable

ROUNDS, STEPS = 4, 5


def over_the_run(steps: int = STEPS, **training: Any) -> list[float]:
    """The shares of the learning rate at each step of a run."""
    settings = Training.model_validate(training)
    each = (rate_factors(settings, steps, number, ROUNDS) for number in range(1, ROUNDS + 1))
    return list(chain.from_iterable(each))


def of_torch(make: Any) -> list[float]:
    """The rates of one of torch's schedules over as many steps, from a full rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler: LRScheduler = make(optimizer)
    rates = []
    for _ in range(ROUNDS * STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("constant", lambda optimizer: LambdaLR(optimizer, lambda _: 1.0)),
        ("linear", lambda optimizer: LinearLR(optimizer, 1.0, 0.0, total_iters=ROUNDS * STEPS)),
        ("cosine", lambda optimizer: CosineAnnealingLR(optimizer, ROUNDS * STEPS)),
    ],
)
def test_the_rounds_of_a_run_follow_torch_s_schedule_of_all_its_steps(schedule: str, make: Any) -> None:
    assert over_the_run(schedule=schedule) == pytest.approx(of_torch(make), abs=1e-12)


def test_a_warm_up_rises_to_the_full_rate_and_the_schedule_begins_after_it() -> None:
    # A quarter of 20 steps is 5: rates of 1/5 to 5/5, then 15 steps of the linear decay from 1.
    expected = [*(step / 5 for step in range(1, 6)), *(1 - step / 15 for step in range(15))]
    assert over_the_run(schedule="linear", warmup=0.25) == pytest.approx(expected)
    assert over_the_run(warmup=0.25) == pytest.approx([*expected[:5], *[1.0] * 15])


def test_sites_with_more_steps_follow_the_same_curve() -> None:
    few, many = (over_the_run(steps, schedule="cosine") for steps in (3, 30))
    # Each of three steps begins where ten of thirty do.
    assert few == pytest.approx(many[::10])
    # A site with one step in each round has the rates with which the rounds begin.
    assert over_the_run(1, schedule="cosine") == pytest.approx(few[::3])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("rounds", [1, 3, 1_000_000])
def test_no_step_has_a_rate_of_zero_or_above_the_full_one(schedule: Any, warmup: float, rounds: int) -> None:
    settings = Training(schedule=schedule, warmup=warmup)
    for number in {1, rounds}:
        assert all(0 < factor <= 1 for factor in rate_factors(settings, 7, number, rounds))


def test_the_rates_of_a_task_sum_to_steps_at_the_full_rate() -> None:
    settings = Training(schedule="linear")
    # Round 3 of 4 in 5 steps: 0.5, 0.45, 0.4, 0.35 and 0.3.
    assert full_rate_steps(settings, 5, 3, 4) == pytest.approx(2.0)
    assert full_rate_steps(Training(), 5, 3, 4) == 5.0


def test_a_claim_of_steps_without_end_is_summed_only_without_a_schedule() -> None:
    assert full_rate_steps(Training(), 1 << 50, 1, 1) == 2.0**50
    require_summable(Training(schedule="cosine"), MAX_STEPS)
    for training in ({"schedule": "cosine"}, {"warmup": 0.1}):
        with pytest.raises(ValueError, match=r"1000001 steps .* set training\.steps, or a constant"):
            full_rate_steps(Training.model_validate(training), MAX_STEPS + 1, 1, 1)


# ---------------------------------------------------------------- epochs or steps


@pytest.mark.parametrize(
    ("training", "examples", "steps", "epochs"),
    [
        ({"epochs": 3}, 100, 12, 3),
        ({"epochs": 3, "batch_size": None}, 100, 3, 3),
        ({"steps": 8}, 100, 8, 2),
        ({"steps": 9}, 100, 9, 3),
        ({"steps": 1}, 1 << 40, 1, 1),
        ({"steps": 7}, 1, 7, 7),
        ({"steps": 7, "batch_size": None}, 100, 7, 7),
    ],
)
def test_steps_are_epochs_of_the_site_rounded_up(
    training: dict[str, Any], examples: int, steps: int, epochs: int
) -> None:
    # 100 examples in batches of 32 are 4 steps.
    settings = Training.model_validate(training)
    assert (local_steps(settings, examples), local_epochs(settings, examples)) == (steps, epochs)


def test_a_round_has_a_length_in_epochs_or_in_steps() -> None:
    assert (Training().epochs, Training().steps) == (1, None)
    assert (Training(steps=5).epochs, Training(steps=5).steps) == (None, 5)
    with pytest.raises(ValidationError, match=r"epochs is 1 and steps is 5, but only one .* leave out the other"):
        Training(epochs=1, steps=5)
    with pytest.raises(ValidationError, match="epochs is null and steps is not given: set one of them"):
        Training(epochs=None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"crop": [0.0, 1.0]}, r"crop is \[0.0, 1.0\]: give two numbers above 0, at most 1, in order"),
        ({"crop": [0.9, 0.5]}, "in order"),
        ({"crop": [0.5, 1.5]}, "at most 1"),
        ({"crop": [0.5]}, "Field required"),
        ({"crop": [0.5, 1.0], "crop_aspect": [2.0, 1.0]}, "crop_aspect is"),
        ({"crop_aspect": [0.5, 2.0]}, "crop_aspect is set without crop: set crop, or leave crop_aspect out"),
        ({"rand_augment_magnitude": 5}, "set without rand_augment"),
        ({"rand_augment": 9}, "less than or equal to 8"),
        ({"rand_augment": 1, "rand_augment_magnitude": 31}, "less than or equal to 30"),
        ({"horizontal_flip": 1.1}, "less than or equal to 1"),
        ({"vertical_flip": -0.1}, "greater than or equal to 0"),
        ({"hue": 0.6}, "less than or equal to 0.5"),
        ({"brightness": float("nan")}, "finite number"),
        ({"crop_padding": -1}, "greater than or equal to 0"),
        ({"flip": 0.5}, "Extra inputs"),
    ],
)
def test_augmentation_out_of_range_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Training.model_validate({"augmentation": given})


def test_augmentation_that_changes_nothing_is_none() -> None:
    assert Training(augmentation=Augmentation()) == Training()
    assert Augmentation(hue=0.1, horizontal_flip=0.5, rand_augment=2).colours == ["hue", "rand_augment"]


def test_a_cosine_is_half_at_half_of_the_run() -> None:
    (factor,) = rate_factors(Training(schedule="cosine"), 1, 3, 4)
    assert factor == pytest.approx((1 + math.cos(math.pi / 2)) / 2) == pytest.approx(0.5)
