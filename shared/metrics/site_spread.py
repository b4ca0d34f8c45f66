"""Distribution of a version's scores over the sites: mean, worst site and deviation."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

from tessera.shared.api.class_counts import Counts, can_pool, pooled
from tessera.shared.api.runs import Measurement
from tessera.shared.schema import CHOICE_ACCURACY, EXACT_MATCH, ROUGE_L, SCORED_LABELS

PERSONAL = "personal_"
"""Prefix of the metrics of a site's own model."""

BETTER_LOW = ("loss", "calibration_error", "mae")
"""Lower values of these are better, also of those of own models."""

FROM_COUNTS = ("macro_f1", "micro_f1", "calibration_error", "entity_f1", "entity_partial_f1", "r2")
"""Metrics of all examples that only counts give: by class, by bin, or sums of a regression. No weighted mean of sites
does. Where a site sends no counts, they are means of the sites' own values, each site alike, and are named so."""

MEANS_OF_SITES = (*FROM_COUNTS, "macro_auroc")
"""The same, and the metric that needs histograms of scores: over several sites it is among the figures alone."""

BY_LABEL = ("loss", "accuracy", *MEANS_OF_SITES)
"""Metrics that are means over labels. All others are means over examples."""

HEADLINES = ("entity_f1", CHOICE_ACCURACY, ROUGE_L, "accuracy", "micro_f1", "mae", "loss")
"""Tables show the first of these that was measured; `tessera run metrics` has the others."""

LISTED = (
    "entity_f1",
    "entity_partial_f1",
    CHOICE_ACCURACY,
    ROUGE_L,
    EXACT_MATCH,
    "accuracy",
    "micro_f1",
    "macro_f1",
    "mae",
    "r2",
    "loss",
)
"""A run's page and the live view in a terminal show all of these that were measured, in this order."""

DECILE_SITES = 10
"""Number of sites from which on the mean of the worst tenth is reported: with fewer, it is one site's chance."""


class SiteScores(NamedTuple):
    """The scores of a measurement. A long run has thousands, and whole measurements take three times as long."""

    version: int
    worker: str
    site: str
    held_out: bool
    labels: int
    examples: int
    metrics: Mapping[str, float]
    class_counts: Counts | None = None


Measured = Measurement | SiteScores


class Score(NamedTuple):
    """One number of one site. Comparing the versions of a long run takes thousands of them."""

    site: str
    labels: int
    """The number of labels, or of examples, over which it is the mean."""
    value: float
    counts: Counts | None = None
    """If its site sends them and the metric follows from them."""


@dataclass(frozen=True)
class Spread:
    """One number over the sites. A higher loss is worse, and a lower accuracy."""

    sites: int
    mean: float
    """Each site counts alike."""
    weighted_mean: float
    """Each label or example counts alike."""
    worst: float
    worst_site: str
    deviation: float
    """The standard deviation over these sites, divided by their number: they are all there are, and no sample."""
    worst_decile: float | None
    """The mean of the worst tenth of the sites, rounded up; None below ten sites."""


def is_better_low(metric: str) -> bool:
    """Return True if lower values of a metric are better."""
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
        weighted_mean=fmean(values, [score.labels for score in worst_first]),
        worst=values[0],
        worst_site=worst_first[0].site,
        deviation=pstdev(values),
        worst_decile=fmean(values[: math.ceil(count / 10)]) if count >= DECILE_SITES else None,
    )


def spreads(measurements: Iterable[Measured], names: Collection[str] | None = None) -> dict[int, dict[str, Spread]]:
    """By version and name, what sites measured on the data that they hold out; what is central does not count.

    The workers of one site count as one, each in proportion to its labels. `names` are those that are wanted; all by
    default.
    """
    found: dict[int, dict[str, list[Score]]] = {}
    for one in measurements:
        if one.held_out:
            for name, value in _wanted(one, names):
                found.setdefault(one.version, {}).setdefault(name, []).append(
                    Score(one.site, weight_of(one, name), value)
                )
    return {
        version: {
            name: spread(_by_site(scores), better_low=is_better_low(name)) for name, scores in sorted(by_name.items())
        }
        for version, by_name in sorted(found.items())
    }


def headlines(names: Collection[str]) -> Iterator[str]:
    """Yield the names of a version's headline metric and of the personal models' headline metric."""
    for prefix in ("", PERSONAL):
        yield from [prefix + name for name in HEADLINES if prefix + name in names][:1]


def scores_by_site(measurements: Iterable[Measured], name: str) -> dict[str, dict[int, float]]:
    """Return one number that sites measured on their held-out examples, by site and version.

    The workers of a site count as one, each in proportion to its labels.
    """
    found: dict[str, dict[int, list[Score]]] = {}
    for one in measurements:
        if one.held_out and name in one.metrics:
            scores = found.setdefault(one.site, {}).setdefault(one.version, [])
            scores.append(Score(one.site, weight_of(one, name), one.metrics[name]))
    return {site: {v: joined(scores).value for v, scores in of_site.items()} for site, of_site in found.items()}


def _by_site(scores: Iterable[Score]) -> list[Score]:
    """Return one score a site."""
    scores = list(scores)
    if len({score.site for score in scores}) == len(scores):
        return scores
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.site, []).append(score)
    return [joined(of_site) for of_site in found.values()]


def joined(scores: list[Score]) -> Score:
    """Return the scores of a site's workers as one, each in proportion to its labels."""
    if len(scores) == 1:
        return scores[0]
    labels = [score.labels for score in scores]
    value = fmean([score.value for score in scores], labels)
    return Score(scores[0].site, sum(labels), value, pooled([score.counts for score in scores]))


# ---------------------------------------------------------------- over versions


def over_sites(name: str, scores: Iterable[Score]) -> float:
    """Return a metric over some sites: each label counts alike or, without its counts, each site."""
    by_site = _by_site(scores)
    # A site's counts may lack a score that its metrics have: then the mean is left.
    if (counts := pooled([score.counts for score in by_site])) and name in (found := counts.scores()):
        return found[name]
    alike = name.removeprefix(PERSONAL) in MEANS_OF_SITES
    return fmean([score.value for score in by_site], None if alike else [score.labels for score in by_site])


def name_over_sites(name: str, scores: Iterable[Score] = ()) -> str:
    """Return the name of a metric's value over several sites, as `over_sites` computes it of these scores."""
    is_mean = name.removeprefix(PERSONAL) in MEANS_OF_SITES and not can_pool([score.counts for score in scores])
    return f"{name} (mean of sites)" if is_mean else name


def weighs_labels(name: str) -> bool:
    """Return True if a metric is a mean over labels, and False if it is one over examples."""
    return name.removeprefix(PERSONAL) in BY_LABEL


def weight_of(one: Measured, name: str) -> int:
    """Return the number of labels, or of examples, over which a metric is the mean."""
    return one.labels if weighs_labels(name) else one.examples


def score_of(one: Measured, name: str) -> Score:
    """Return one number of a measurement, with the counts from which it follows over several sites."""
    return Score(one.site, weight_of(one, name), one.metrics[name], one.class_counts if name in FROM_COUNTS else None)


def scores_by_version(
    measurements: Iterable[Measured], names: Collection[str] | None = None
) -> dict[int, dict[str, float]]:
    """Return the scores of each version: on the central data set or, of one that was not measured there, over
    the sites, under the names of `name_over_sites`. `names` are those that are wanted; all by default."""
    by_version: dict[int, list[Measured]] = {}
    for measurement in measurements:
        by_version.setdefault(measurement.version, []).append(measurement)
    return {version: _scores(group, names) for version, group in by_version.items()}


def _scores(group: list[Measured], names: Collection[str] | None) -> dict[str, float]:
    central = [measurement for measurement in group if not measurement.held_out]
    by_name: dict[str, list[Score]] = {}
    for one in central or group:
        for name, _ in _wanted(one, names):
            # One that measured nothing has no weight.
            if one.labels:
                by_name.setdefault(name, []).append(score_of(one, name))
    return {
        name if central else name_over_sites(name, scores): over_sites(name, scores)
        for name, scores in sorted(by_name.items())
    }


def _wanted(one: Measured, names: Collection[str] | None) -> Iterable[tuple[str, float]]:
    chosen = one.metrics if names is None else names
    return ((name, one.metrics[name]) for name in chosen if name in one.metrics and name != SCORED_LABELS)
