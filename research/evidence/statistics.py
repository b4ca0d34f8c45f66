"""Intervals, and tests of differences that are paired by seed.

No test here assumes more than it says: the t-intervals and the equivalence test take the differences for normal; the
sign-flip test takes them only for symmetric about their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, lgamma, sqrt
from statistics import fmean, stdev
from typing import Any, TypeVar

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95
STANDARD_ERRORS = 5.0
"""By which a reference must exceed the most frequent class, or its table is void."""
MOST_FLIPPED = 20
"""Differences of which all sign patterns are enumerated."""
ROUNDING = 1e-12
"""Relative: sums of the same numbers in another order are equal."""

K = TypeVar("K")


def paired(first: Mapping[K, float], second: Mapping[K, float]) -> list[float]:
    """Return the differences, first less second, of the keys that both have, in the order of `first`."""
    return [value - second[key] for key, value in first.items() if key in second]


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the ends of the t-interval of a mean of two values or more."""
    reach = student.ppf((1 + confidence) / 2, len(values) - 1) * stdev(values) / sqrt(len(values))
    return fmean(values) - float(reach), fmean(values) + float(reach)


def effect_size(values: Sequence[float]) -> float:
    """Return d_z, mean over standard deviation of two differences or more, with Hedges' correction.

    The correction is the exact one for n - 1 degrees of freedom (Hedges 1981). Equal differences have an infinite
    size, or 0 if they are 0.
    """
    mean, deviation, freedom = fmean(values), stdev(values), len(values) - 1
    if not deviation:
        return float(np.sign(mean)) * float("inf") if mean else 0.0
    correction = exp(lgamma(freedom / 2) - lgamma((freedom - 1) / 2)) / sqrt(freedom / 2) if freedom > 1 else 0.0
    return mean / deviation * correction


def sign_flip_p(values: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact sign-flip test: the share of sign patterns whose mean is as large.

    With n differences it cannot be below 2 / 2^n: 0.0625 of five, 0.002 of ten. Raises ValueError for more than
    MOST_FLIPPED differences.
    """
    if len(values) > MOST_FLIPPED:
        raise ValueError(f"{len(values)} differences have too many sign patterns: test at most {MOST_FLIPPED}")
    if not values:
        return 1.0
    signs = np.array(list(product((1.0, -1.0), repeat=len(values))))  # [patterns, differences]
    sums = np.abs(signs @ np.asarray(values))
    least = abs(sum(values)) - ROUNDING * sum(map(abs, values))
    return float((sums >= least).mean())


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """Return the p-value of two one-sided t-tests that the mean of two differences or more is within +- margin.

    It is the larger of both. Below 0.05 it means that the 90 % interval lies within the margin.
    """
    error, freedom = stdev(values) / sqrt(len(values)), len(values) - 1
    if not error:
        return 0.0 if abs(fmean(values)) < margin else 1.0
    above = student.sf((fmean(values) + margin) / error, freedom)
    below = student.cdf((fmean(values) - margin) / error, freedom)
    return float(max(above, below))


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Return p-values adjusted by Holm's step-down procedure for a family of tests."""
    adjusted: dict[K, float] = {}
    largest = 0.0
    for place, (key, p) in enumerate(sorted(p_values.items(), key=lambda each: each[1])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p))
        adjusted[key] = largest
    return adjusted


@dataclass(frozen=True)
class Trend:
    """The least-squares line of a curve's values, one a round."""

    slope: float
    """Units a round."""
    jitter: float
    """The standard deviation about the line."""
    error: float
    """The slope's standard error, if values vary about the line independently."""


def trend(values: Sequence[float]) -> Trend:
    """Return the line through three values or more."""
    places = np.arange(len(values), dtype=np.float64)
    slope, start = np.polyfit(places, np.asarray(values, dtype=np.float64), 1)
    left = np.asarray(values) - (start + slope * places)
    jitter = float(np.sqrt((left**2).sum() / (len(values) - 2)))
    return Trend(float(slope), jitter, jitter / float(np.sqrt(((places - places.mean()) ** 2).sum())))


def floor(share: float, examples: int, errors: float = STANDARD_ERRORS) -> float:
    """Return the least accuracy of a model that learned: some standard errors above the most frequent class."""
    return share + errors * sqrt(share * (1 - share) / examples)


# ---------------------------------------------------------------- in a table's cells


def shown_spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean and the standard deviation of some values; a dash for none."""
    if not values:
        return "-"
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def shown_interval(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean of some differences and its t-interval; a dash for none."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:+.{digits}f} (one seed)"
    low, high = interval(values)
    return f"{fmean(values):+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def described(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, interval, effect size, signs and p-value of two differences or more."""
    low, high = interval(values)
    return {
        "n": len(values),
        "mean": fmean(values),
        "low": low,
        "high": high,
        "d_z": effect_size(values),
        "positive": sum(value > 0 for value in values),
        "p": sign_flip_p(values),
    }
