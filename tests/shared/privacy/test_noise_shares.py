"""The accounting of noise in shares: each bound is compared with the distribution that it is about."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from tessera.shared.privacy import gaussian
from tessera.shared.privacy.noise_shares import (
    MAX_GROWTH,
    TAIL,
    convolution_gap,
    epsilon_of,
    rho_for,
    rho_of,
    share_for,
    squared_norm_bound,
)
from tessera.shared.run_settings import Budget

WIDE = np.arange(-400, 401)


def discrete_gaussian(variance: float) -> np.ndarray:
    weights = np.exp(-(WIDE**2) / (2 * variance))
    return weights / weights.sum()


def sum_of_shares(deviation: int, shares: int) -> np.ndarray:
    share = found = discrete_gaussian(deviation**2)
    for _ in range(shares - 1):
        found = np.convolve(found, share, mode="same")
    return found


@pytest.mark.parametrize(("deviation", "shares"), list(product([1, 2], [2, 3, 5])))
def test_a_sum_of_shares_is_as_near_to_a_discrete_gaussian_as_the_bound_says(deviation: int, shares: int) -> None:
    found, wanted = sum_of_shares(deviation, shares), discrete_gaussian(shares * deviation**2)
    # In float64, where tails are too small to compare.
    body = wanted > 1e-9
    ratio = np.abs(np.log(found[body] / wanted[body])).max()
    assert ratio <= convolution_gap(deviation, shares) + 1e-6


@pytest.mark.parametrize(("deviation", "shares", "step"), list(product([1, 2], [2, 4], [1, 3])))
def test_the_divergence_of_a_moved_sum_is_within_the_bound(deviation: int, shares: int, step: int) -> None:
    noise = sum_of_shares(deviation, shares)
    # The largest terms are around `order` steps; beyond eight deviations of them they are nothing.
    body = np.abs(WIDE) < 4 * step + 8 * deviation * math.sqrt(shares)
    moved, still = np.log(np.roll(noise, step)[body]), np.log(noise[body])
    rho = rho_of(step**2, deviation, shares, values=1)
    for order in (1.5, 2, 4):
        divergence = math.log(np.exp(order * moved + (1 - order) * still).sum()) / (order - 1)
        assert divergence <= order * rho * (1 + 1e-9)
        # And not far above it: the noise is no more than the target needs.
        assert divergence > 0.9 * order * rho


def test_more_shares_than_are_counted_reveal_less() -> None:
    assert rho_of(100.0, 20, 5, 10) < rho_of(100.0, 20, 4, 10) < rho_of(101.0, 20, 4, 10)


def test_random_rounding_stays_within_the_norm_bound() -> None:
    rng = np.random.default_rng(0)
    for values, clip in ((1, 3.0), (100, 40.0), (10_000, 60.0), (10_000, 5000.0)):
        direction = rng.normal(size=values)
        point = clip * direction / np.linalg.norm(direction)
        longest = max(np.sum(np.floor(point + rng.random(values)) ** 2) for _ in range(200))
        assert longest <= squared_norm_bound(clip, values)
        assert squared_norm_bound(clip, values) <= (clip + math.sqrt(values)) ** 2


@pytest.mark.parametrize("rho", [1e-4, 0.01, 0.5, 20.0, 800.0])
def test_the_epsilon_is_a_little_above_that_of_gaussian_noise(rho: float) -> None:
    exact = gaussian.epsilon_of(1 / math.sqrt(2 * rho), 1, 1e-5)
    assert exact <= epsilon_of(rho, 1e-5) <= 1.3 * exact
    assert epsilon_of(0.0, 1e-5) == 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 1000.0])
def test_the_noise_uses_up_the_target_and_no_more(epsilon: float) -> None:
    rho = rho_for(Budget(epsilon=epsilon, delta=1e-5))
    assert epsilon * (1 - 1e-9) <= epsilon_of(rho, 1e-5) <= epsilon


@pytest.mark.parametrize(
    ("epsilon", "rounds", "sites", "values"),
    list(product([0.5, 8.0, 1000.0], [1, 100], [3, 1024], [1, 100_000])),
)
def test_a_share_is_the_least_that_the_target_allows_and_has_room(
    epsilon: float, rounds: int, sites: int, values: int
) -> None:
    rho, levels = rho_for(Budget(epsilon=epsilon, delta=1e-5)) / rounds, ((1 << 31) - 1) // sites
    share = share_for(rho, 0.3, 3, values, levels)
    clip = 0.3 * 2.0**-share.exponent
    bound = squared_norm_bound(clip, values)
    assert rho_of(bound, share.deviation, 3, values) <= rho < rho_of(bound, share.deviation - 1, 3, values)
    assert clip + TAIL * share.deviation <= levels
    assert share.growth == pytest.approx(math.sqrt(bound) / clip)
    assert share.growth < MAX_GROWTH


def test_the_conversion_takes_some_percent_more_noise_than_gaussian_noise_needs() -> None:
    for epsilon, more in ((0.1, 0.11), (4.0, 0.07), (1000.0, 0.01)):
        target = Budget(epsilon=epsilon, delta=1e-5)
        ratio = 1 / math.sqrt(2 * rho_for(target)) / (gaussian.noise_multiplier_for(target, 10_000) / 100)
        assert 0.9 * more < ratio - 1 < 1.05 * more


def test_rounding_of_a_large_model_by_six_sites_costs_next_to_nothing() -> None:
    rho = rho_for(Budget(epsilon=1.0, delta=1e-5)) / 8
    assert share_for(rho, 1.0, 4, 25_000_000, levels=((1 << 31) - 1) // 6).growth < 1 + 1e-5


def test_sums_without_room_for_the_noise_are_refused() -> None:
    rho = rho_for(Budget(epsilon=1000.0, delta=1e-5))
    with pytest.raises(ValueError, match=r"cohort\.size"):
        share_for(rho, 0.3, 3, 10, levels=((1 << 15) - 1) // 200)


def test_rounding_many_values_for_many_sites_takes_more_noise_than_the_update() -> None:
    rho = rho_for(Budget(epsilon=0.5, delta=1e-5)) / 100
    assert share_for(rho, 0.3, 3, 1 << 24, levels=((1 << 31) - 1) // 1024).growth > MAX_GROWTH
