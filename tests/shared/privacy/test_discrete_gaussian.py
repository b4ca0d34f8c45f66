"""The sampler's integers have the discrete Gaussian distribution: by frequencies, by moments, and in the tails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.shared.privacy.discrete_gaussian import MAX_DEVIATION, discrete_gaussian
from tessera.shared.privacy.noise import NoiseSource

KEY = bytes(range(32))


def drawn(deviation: int, count: int, key: bytes = KEY) -> np.ndarray:
    return discrete_gaussian(NoiseSource(key), deviation, count)


def probabilities(deviation: int, values: np.ndarray) -> np.ndarray:
    every = np.arange(-40 * deviation, 40 * deviation + 1)
    return np.exp(-(values**2) / (2 * deviation**2)) / np.exp(-(every**2) / (2 * deviation**2)).sum()


@pytest.mark.parametrize(("deviation", "width"), [(1, 1), (2, 1), (3, 1), (16, 4), (100, 25)])
def test_each_integer_is_as_frequent_as_it_should_be(deviation: int, width: int) -> None:
    count, most = 200_000, 4 * deviation // width
    bins = np.clip(np.floor_divide(drawn(deviation, count) + width // 2, width), -most, most)
    values = np.arange(-40 * deviation, 40 * deviation + 1)
    places = np.clip(np.floor_divide(values + width // 2, width), -most, most)
    expected = count * np.bincount(places + most, probabilities(deviation, values))
    found = np.bincount(bins + most, minlength=expected.size)
    freedom = expected.size - 1
    chi_square = ((found - expected) ** 2 / expected).sum()
    # Wilson and Hilferty: the cube root is nearly normal. Four deviations, and the draws are always the same.
    root = (chi_square / freedom) ** (1 / 3)
    assert abs(root - (1 - 2 / (9 * freedom))) < 4 * math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("deviation", [1, 2, 7, 1000, 1 << 20, MAX_DEVIATION])
def test_the_moments_are_those_of_the_distribution(deviation: int) -> None:
    count = 100_000
    values = drawn(deviation, count) / deviation
    # From sigma = 1 on, the moments differ from those of a normal variable by less than 1e-6.
    for moment, variance in ((values, 1), (values**2 - 1, 2), (values**3, 15), (values**4 - 3, 96)):
        assert abs(moment.mean()) < 4.5 * math.sqrt(variance / count)


def test_the_tail_is_not_cut_off() -> None:
    values = np.abs(drawn(3, 1_000_000))
    # Some thirty in a million are 13 or more from zero.
    expected = 1e6 * 2 * probabilities(3, np.arange(13, 120)).sum()
    assert abs((values >= 13).sum() - expected) < 4 * math.sqrt(expected)


def test_the_same_key_draws_the_same_and_another_draws_others() -> None:
    assert np.array_equal(drawn(50, 1000), drawn(50, 1000))
    assert not np.array_equal(drawn(50, 1000), drawn(50, 1000, bytes(32)))
    assert drawn(50, 0).shape == (0,)


@pytest.mark.parametrize("deviation", [0, -1, MAX_DEVIATION + 1])
def test_a_deviation_out_of_range_is_refused(deviation: int) -> None:
    with pytest.raises(ValueError, match="is not within"):
        drawn(deviation, 1)
