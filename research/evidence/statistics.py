"""Trends of curves, and statistics in a table's cells. Tests and intervals are the product's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

from tessera.simulation.comparison.statistics import effect_size, interval, sign_flip_p

STANDARD_ERRORS = 5.0
"""By which a reference must exceed the most frequent class, or its table is void."""


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
