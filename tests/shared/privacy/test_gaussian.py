"""The exact cost of Gaussian noise, beside an accountant of others and beside the integral that defines it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.integrate import quad
from scipy.stats import norm

from tessera.shared.privacy.gaussian import delta_of, epsilon_of, noise_multiplier_for
from tessera.shared.run_settings import Budget

TARGETS = [(0.1, 1e-6, 10), (1.0, 1e-5, 1), (3.0, 1e-5, 100), (8.0, 1e-3, 1000), (1000.0, 1e-5, 20)]


@pytest.mark.parametrize(("noise", "releases", "delta"), [(1.0, 1, 1e-5), (5.0, 40, 1e-6), (30.0, 500, 1e-5)])
def test_epsilon_is_that_of_composed_privacy_loss_distributions(noise: float, releases: int, delta: float) -> None:
    step = from_gaussian_mechanism(noise, value_discretization_interval=1e-4)
    expected = step.self_compose(releases).get_epsilon_for_delta(delta)
    # The library rounds each loss up to its grid.
    assert expected * 0.99 < epsilon_of(noise, releases, delta) <= expected


@pytest.mark.parametrize(("epsilon", "noise"), [(0.0, 1.0), (0.5, 2.0), (2.0, 0.8)])
def test_delta_is_the_hockey_stick_divergence(epsilon: float, noise: float) -> None:
    def excess(x: float) -> float:
        return float(max(0.0, norm.pdf(x, 1, noise) - math.exp(epsilon) * norm.pdf(x, 0, noise)))

    # Beyond this point the first density is the larger one.
    crossing = 0.5 + epsilon * noise**2
    integral, _ = quad(excess, crossing, 1 + 40 * noise, epsabs=1e-13)
    assert delta_of(epsilon, noise) == pytest.approx(integral, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "delta", "releases"), TARGETS)
def test_noise_meets_its_target_and_is_no_larger_than_needed(epsilon: float, delta: float, releases: int) -> None:
    noise = noise_multiplier_for(Budget(epsilon=epsilon, delta=delta), releases)
    assert epsilon_of(noise, releases, delta) <= epsilon * (1 + 1e-9)
    assert epsilon_of(noise - 0.002, releases, delta) > epsilon
    assert noise * 1000 == pytest.approx(round(noise * 1000), abs=1e-6)


def test_each_release_costs_more_and_none_costs_nothing() -> None:
    costs = [epsilon_of(4.0, releases, 1e-5) for releases in range(6)]
    assert costs[0] == 0
    assert np.all(np.diff(costs) > 0)


def test_noise_that_hides_everything_at_its_delta_costs_no_epsilon() -> None:
    assert epsilon_of(1e9, 1, 1e-3) < 1e-6


def test_a_loss_beyond_the_range_of_floats_is_bounded_from_above() -> None:
    assert 0 < delta_of(701.0, 0.02) <= 1
    assert epsilon_of(0.001, 1, 1e-5) > 1000
