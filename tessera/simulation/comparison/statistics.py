"""Intervals, and tests of differences that are paired by seed.

No test here assumes more than it says: the t-intervals and the equivalence test take the differences for normal; the
sign-flip test takes them only for symmetric about their mean.
"""

from collections.abc import Mapping, Sequence
from math import exp, inf, lgamma, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tessera.shared.lazy_import import DeferredModule

if TYPE_CHECKING:
    from scipy import stats
else:
    stats = DeferredModule("scipy.stats")

CONFIDENCE = 0.95
MOST_FLIPPED = 20
"""The most differences whose sign patterns are all enumerated: 8 MB of sums."""
ROUNDING = 1e-12
"""Relative: sums of the same numbers in another order are equal."""

K = TypeVar("K")


def paired(first: Mapping[K, float], second: Mapping[K, float]) -> list[float]:
    """Return the differences, first less second, of the keys that both have, in the order of `first`."""
    return [value - second[key] for key, value in first.items() if key in second]


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the ends of the t-interval of a mean of two values or more."""
    reach = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stdev(values) / sqrt(len(values))
    return fmean(values) - float(reach), fmean(values) + float(reach)


def effect_size(values: Sequence[float]) -> float:
    """Return d_z, mean over standard deviation of two differences or more, with Hedges' correction.

    The correction is the exact one for n - 1 degrees of freedom (Hedges 1981). Equal differences have an infinite
    size, or 0 if they are 0.
    """
    mean, deviation, freedom = fmean(values), stdev(values), len(values) - 1
    if not deviation:
        return float(np.sign(mean)) * inf if mean else 0.0
    correction = exp(lgamma(freedom / 2) - lgamma((freedom - 1) / 2)) / sqrt(freedom / 2) if freedom > 1 else 0.0
    return mean / deviation * correction


def sign_flip_p(values: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact sign-flip test: the share of sign patterns whose mean is as large.

    With n differences it cannot be below 2 / 2^n: 0.0625 of five, 0.002 of ten. Raises ValueError for more than
    MOST_FLIPPED differences.
    """
    if len(values) > MOST_FLIPPED:
        raise ValueError(f"{len(values)} differences have too many sign patterns: test at most {MOST_FLIPPED}")
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate((sums + value, sums - value))
    least = abs(sum(values)) - ROUNDING * sum(map(abs, values))
    return float((np.abs(sums) >= least).mean())


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided t-tests that the mean of two differences or more is within +- margin.

    It is the larger of both. Below 0.05 it means that the 90 % interval lies within the margin.
    """
    error, freedom = stdev(values) / sqrt(len(values)), len(values) - 1
    if not error:
        return 0.0 if abs(fmean(values)) < margin else 1.0
    above = stats.t.sf((fmean(values) + margin) / error, freedom)
    below = stats.t.cdf((fmean(values) - margin) / error, freedom)
    return float(max(above, below))


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Return p-values adjusted by Holm's step-down procedure for a family of tests."""
    adjusted: dict[K, float] = {}
    largest = 0.0
    for place, (key, p) in enumerate(sorted(p_values.items(), key=lambda each: each[1])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p))
        adjusted[key] = largest
    return adjusted
