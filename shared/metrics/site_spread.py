"""Distribution of a version's scores over the sites: mean, worst site and deviation."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev

from tessera.shared.api.runs import Measurement

PERSONAL = "personal_"
"""Prefix of the metrics of a site's own model."""

BETTER_LOW = ("loss", "calibration_error")
"""Lower values of these are better, also of those of own models."""

HEADLINES = ("accuracy", "loss")
"""Tables show the first of these that was measured; `tessera run metrics` has the others."""

DECILE_SITES = 10
"""Number of sites from which on the mean of the worst tenth is reported: with fewer, it is one site's chance."""


@dataclass(frozen=True)
class Score:
    """One number of one site."""

    site: str
    examples: int
    value: float


@dataclass(frozen=True)
class Spread:
    """One number over the sites. What is worse depends on the number: a higher loss, a lower accuracy."""

    sites: int
    mean: float
    """Each site counts alike."""
    weighted_mean: float
    """Each example counts alike."""
    worst: float
    worst_site: str
    deviation: float
    """The standard deviation over these sites, divided by their number: they are all there are, and no sample."""
    worst_decile: float | None
    """The mean of the worst tenth of the sites, rounded up; None below ten sites."""


def is_better_low(metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return metric.removeprefix(PERSONAL) in BETTER_LOW


def spread(scores: Iterable[Score], *, better_low: bool = False) -> Spread:
    """Figures over the sites, one score each. Raises ValueError if there is none, or a site has two."""
    by_site = sorted(scores, key=lambda score: score.site)
    if not by_site or len({score.site for score in by_site}) < len(by_site):
        raise ValueError(f"one score a site is needed, not those of {[score.site for score in by_site]}")
    worst_first = sorted(by_site, key=lambda score: -score.value if better_low else score.value)
    values = [score.value for score in worst_first]
    count = len(values)
    return Spread(
        sites=count,
        mean=fmean(values),
        weighted_mean=fmean(values, [score.examples for score in worst_first]),
        worst=values[0],
        worst_site=worst_first[0].site,
        deviation=pstdev(values),
        worst_decile=fmean(values[: math.ceil(count / 10)]) if count >= DECILE_SITES else None,
    )


def spreads(
    measurements: Iterable[Measurement], names: Collection[str] | None = None
) -> dict[int, dict[str, Spread]]:
    """By version and name, what sites measured on the data that they hold out; what is central does not count.

    The workers of one site count as one, each in proportion to its examples. `names` are those that are wanted; all
    by default.
    """
    found: dict[int, dict[str, dict[str, list[Score]]]] = {}
    for one in measurements:
        if one.held_out:
            for name, value in _wanted(one, names):
                by_site = found.setdefault(one.version, {}).setdefault(name, {})
                by_site.setdefault(one.site, []).append(Score(one.site, one.examples, value))
    return {version: _by_name(of_version) for version, of_version in sorted(found.items())}


def _by_name(names: Mapping[str, Mapping[str, list[Score]]]) -> dict[str, Spread]:
    return {
        name: spread(map(_joined, by_site.values()), better_low=is_better_low(name))
        for name, by_site in sorted(names.items())
    }


def headlines(names: Collection[str]) -> Iterator[str]:
    """Yield the names of the headline metric of a version and of the one of the personal models."""
    for prefix in ("", PERSONAL):
        yield from [prefix + name for name in HEADLINES if prefix + name in names][:1]


def scores_by_site(measurements: Iterable[Measurement], name: str) -> dict[str, dict[int, float]]:
    """Return one number that sites measured on what they hold out, by site and version.

    The workers of a site count as one, each in proportion to its examples.
    """
    found: dict[str, dict[int, list[Score]]] = {}
    for one in measurements:
        if one.held_out and name in one.metrics:
            scores = found.setdefault(one.site, {}).setdefault(one.version, [])
            scores.append(Score(one.site, one.examples, one.metrics[name]))
    return {site: {v: _joined(scores).value for v, scores in of_site.items()} for site, of_site in found.items()}


def _joined(scores: list[Score]) -> Score:
    examples = [score.examples for score in scores]
    return Score(scores[0].site, sum(examples), fmean([score.value for score in scores], examples))


# ---------------------------------------------------------------- over versions


def scores_by_version(
    measurements: Iterable[Measurement], names: Collection[str] | None = None
) -> dict[int, dict[str, float]]:
    """Return what was measured of each version: on the central data set or, of one that was not measured there, the
    example-weighted mean over the sites. `names` are those that are wanted; all by default."""
    by_version: dict[int, list[Measurement]] = {}
    for measurement in measurements:
        by_version.setdefault(measurement.version, []).append(measurement)
    return {version: _mean(group, names) for version, group in by_version.items()}


def _mean(group: list[Measurement], names: Collection[str] | None) -> dict[str, float]:
    counted = [measurement for measurement in group if not measurement.held_out] or group
    by_name: dict[str, tuple[list[float], list[int]]] = {}
    for one in counted:
        for name, value in _wanted(one, names):
            values, examples = by_name.setdefault(name, ([], []))
            values.append(value)
            examples.append(one.examples)
    return {name: fmean(*found) for name, found in sorted(by_name.items()) if any(found[1])}


def _wanted(one: Measurement, names: Collection[str] | None) -> Iterable[tuple[str, float]]:
    if names is None:
        return one.metrics.items()
    return ((name, one.metrics[name]) for name in names if name in one.metrics)
