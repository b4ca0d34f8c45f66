"""Noise that several sites add to one sum, each a share of it, and its accounting.

The distributed discrete Gaussian mechanism (Kairouz, Liu and Steinke 2021, arXiv 2102.06387): each site rounds its
clipped update to integers and adds discrete Gaussian noise. A sum of discrete Gaussians is not one, but almost; the
accounting charges the difference. All lengths here are in steps of the grid, that is, of the value of 1.

rho-zCDP bounds the Renyi divergence of each order alpha by rho alpha, and adds up over releases, also if each query
depends on earlier answers (Bun and Steinke 2016, arXiv 1605.02065).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.shared.privacy.discrete_gaussian import MAX_DEVIATION
from tessera.shared.run_settings import Budget

OVER = 2.0**-32
"""Probability, at most, with which random rounding exceeds the norm bound; the site then rounds towards zero."""
TAIL = 16
"""Standard deviations of a share for which an integer has room. Beyond them a sum wraps around, which costs accuracy
and no privacy: the remainder is a function of the noisy sum."""
LEAST_DEVIATION = 16
"""A share of fewer steps of the grid is refused: its rounding would matter beside it."""
MAX_GROWTH = 1.25
"""Norm bound after rounding over the bound before. Above it, the noise mostly hides the rounding."""
EXACT = 1 << 52
"""The limit of sums of squares, so that float64 has them exactly."""
MAX_EXPONENT = 96
"""Limit of the logarithm to base 2 of a step of the grid, up and down."""
HALVINGS = 100
RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class NoiseShare:
    """The grid of a sum, and the noise of each site."""

    exponent: int
    """The logarithm to base 2 of a step of the grid."""
    deviation: int
    """The parameter sigma of each share, in steps."""
    growth: float
    """The norm bound of a rounded update, over the clip norm."""


def squared_norm_bound(clip: float, values: int) -> float:
    """Return the bound on the squared l2 norm of an update within `clip`, rounded at random (theorem 1, Delta_2^2).

    Without a condition it would be (clip + sqrt(values))^2. Rounding stays within the other bound except with
    probability `OVER`.
    """
    root = math.sqrt(values)
    usual = clip**2 + values / 4 + math.sqrt(2 * math.log(1 / OVER)) * (clip + root / 2)
    return min((clip + root) ** 2, usual)


def convolution_gap(deviation: int, shares: int) -> float:
    """Return the bound on the log ratio of the probabilities of a sum of shares and of the discrete Gaussian with the
    same parameter (theorem 1, tau)."""
    scale = 2 * math.pi**2 * deviation**2
    # A positive number even where the exponential is too small for float64.
    return 10 * sum(math.exp(-scale * k / (k + 1)) + 5e-324 for k in range(1, shares))


def rho_of(squared_bound: float, deviation: int, shares: int, values: int) -> float:
    """Return the zCDP of one release of a sum of `values` numbers with at least `shares` shares of noise each.

    Theorem 1 bounds it by epsilon^2 / 2 with the least of several terms, of which this takes the last, epsilon =
    Delta_2 / (sqrt(n) sigma) + tau sqrt(d). On a grid as fine as ours all of them are equal but for a rounding error.
    """
    gap = convolution_gap(deviation, shares)
    epsilon = math.sqrt(squared_bound / shares) / deviation + gap * math.sqrt(values)
    return epsilon**2 / 2


def share_for(rho: float, clip_norm: float, shares: int, values: int, levels: int) -> NoiseShare:
    """Return the finest grid on which each site's integers stay within `levels`, with the least share of noise that
    `rho` allows. Raises ValueError if there is none.

    `clip_norm` is in the unit of the values, of which an update has `values`.
    """
    for exponent in range(-MAX_EXPONENT, MAX_EXPONENT + 1):
        clip = clip_norm * 2.0**-exponent
        bound = squared_norm_bound(clip, values)
        if bound >= EXACT or clip >= levels:
            continue
        deviation = max(1, math.ceil(math.sqrt(bound / (2 * rho * shares))))
        while deviation <= MAX_DEVIATION and rho_of(bound, deviation, shares, values) > rho:
            deviation += 1
        if deviation > MAX_DEVIATION or clip + TAIL * deviation > levels:
            continue
        if deviation < LEAST_DEVIATION:
            break
        return NoiseShare(exponent, deviation, math.sqrt(bound) / clip)
    raise ValueError(
        f"integers of at most {levels:,} have no room for {values:,} values and their share of the noise: set "
        "cohort.size to fewer sites, or choose a method that trains fewer values"
    )


def epsilon_of(rho: float, delta: float) -> float:
    """Return an epsilon at `delta` of rho-zCDP (Canonne, Kamath and Steinke 2020, arXiv 2004.00010, corollary 13)."""
    if rho <= 0:
        return 0.0

    def at(logarithm: float) -> float:
        """Return the bound of the order alpha whose distance from 1 has this logarithm."""
        above = math.exp(logarithm)
        alpha = 1 + above
        return rho * alpha + logarithm - math.log(alpha) - (math.log(delta) + math.log(alpha)) / above

    # Each order is a valid bound, so an error of the search only makes the result larger.
    middle = math.log(math.log(1 / delta) / rho) / 2
    low, high = middle - 8, middle + 8
    for _ in range(HALVINGS):
        left, right = high - RATIO * (high - low), low + RATIO * (high - low)
        low, high = (low, right) if at(left) <= at(right) else (left, high)
    return max(0.0, at(low))


def rho_for(target: Budget) -> float:
    """Return the largest zCDP that stays within the target, rounded down."""
    low, high = 0.0, 1.0
    while epsilon_of(high, target.delta) <= target.epsilon:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, target.delta) <= target.epsilon else (low, middle)
    return low
