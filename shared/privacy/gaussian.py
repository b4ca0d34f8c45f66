"""Exact accounting of Gaussian noise without sampling.

One release of a sum of sensitivity 1, with noise of standard deviation z, has delta(epsilon) in closed form (Balle
and Wang 2018, arXiv 1805.06530, theorem 8). T releases with the same noise multiplier z compose exactly to one with
z / sqrt(T), also if each query depends on earlier answers (Dong, Roth and Su 2019, arXiv 1905.02383, corollary 3.3).
"""

import math

from tessera.shared.run_settings import Budget

ROUNDING = 1e-12
"""Bound on the relative error of the two terms of `delta_of`, which is added to their difference."""
LARGEST_EXPONENT = 700.0
"""The largest power of e, about, that float64 holds."""
HALVINGS = 100
"""Of an interval, until its ends are neighbours in float64."""
DIGITS = 1000
"""A noise multiplier is rounded up to a multiple of 1 over this, so that every machine computes the same."""


def delta_of(epsilon: float, noise_multiplier: float) -> float:
    """Return the least delta of one release at `epsilon`, rounded up."""
    half, ratio = 0.5 / noise_multiplier, epsilon * noise_multiplier
    first = _normal(half - ratio)
    if epsilon > LARGEST_EXPONENT:
        return first
    return first * (1 + ROUNDING) - math.exp(epsilon) * _normal(-half - ratio) * (1 - ROUNDING)


def epsilon_of(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the least epsilon of all releases together at `delta`, rounded up; 0 without releases."""
    if not releases:
        return 0.0
    together = noise_multiplier / math.sqrt(releases)
    low, high = 0.0, 1.0
    while delta_of(high, together) > delta:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle, together) <= delta else (middle, high)
    return high


def noise_multiplier_for(target: Budget, releases: int) -> float:
    """Return the least noise multiplier with which all releases together stay within the target, rounded up."""
    low, high = 2.0**-20, 2.0**40
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if delta_of(target.epsilon, middle) <= target.delta else (middle, high)
    return math.ceil(high * math.sqrt(releases) * DIGITS) / DIGITS


def _normal(x: float) -> float:
    """Return the standard normal distribution function."""
    return math.erfc(-x / math.sqrt(2)) / 2
