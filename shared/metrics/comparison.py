"""A run's main score and best version, and several runs side by side."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

from tessera.shared.api.class_counts import can_pool
from tessera.shared.api.runs import Measurement, Round, Run, RunSpec
from tessera.shared.metrics.convergence import Clock, Convergence, Curve, RoundCost
from tessera.shared.metrics.evaluation_bytes import evaluation_bytes
from tessera.shared.metrics.site_spread import (
    HEADLINES,
    PERSONAL,
    Measured,
    Score,
    is_better_low,
    joined,
    name_over_sites,
    over_sites,
    score_of,
)

MAIN_SCORES = HEADLINES
"""A run's main score is the first of these that was measured."""
OWN_SCORES = frozenset(PERSONAL + name for name in MAIN_SCORES)

MAX_NAMED = 8
"""Sites that a phrase names; JSON has all."""


PAIRWISE = "two versions are compared at the sites that measured both"
"""Explanation of a best version whose value is worse than another's."""


@dataclass(frozen=True)
class BestVersion:
    """The version with the best score, the earliest of equal ones."""

    number: int
    metric: str
    title: str
    """The name of its value."""
    value: float
    sites: tuple[str, ...] = ()
    """The sites at which it was compared with other versions, over which `value` is taken; none for central data."""
    of_sites: int = 0
    """The number of sites that measured the score of any version."""

    @property
    def where(self) -> str:
        """The sites, as a phrase; empty for central data."""
        if not self.sites:
            return ""
        named = ", ".join(self.sites[:MAX_NAMED]) + (", ..." if len(self.sites) > MAX_NAMED else "")
        return f"at {len(self.sites)} of {self.of_sites} site{'s' if self.of_sites > 1 else ''}: {named}"


class MainScore(NamedTuple):
    """A run's main score: the name of the metric, its values by version, and the scores that these are taken over."""

    name: str
    values: dict[int, float]
    scores: Mapping[int, Mapping[str, Score]]
    """By version and worker; those on the central data set under one empty name."""
    central: bool

    @property
    def title(self) -> str:
        """The name of its values."""
        every = [score for by_worker in self.scores.values() for score in by_worker.values()]
        return self.name if self.central else name_over_sites(self.name, every)


def has_own_models(measurements: Iterable[Measured]) -> bool:
    """Return True if a run makes sites' own models: if at least half of its sites measured one.

    Fewer, such as a single site that reports such a metric under FedAvg, do not decide how a run is measured.
    """
    of_site: dict[str, bool] = {}
    for one in measurements:
        if one.held_out:
            own = not OWN_SCORES.isdisjoint(one.metrics)
            of_site[one.site] = of_site.get(one.site, False) or own
    return bool(of_site) and 2 * sum(of_site.values()) >= len(of_site)


def main_names(measurements: Iterable[Measured]) -> tuple[str, ...]:
    """Return the names of the main scores, of sites' own models if a run makes these."""
    return tuple(PERSONAL + name for name in MAIN_SCORES) if has_own_models(measurements) else MAIN_SCORES


def main_score(
    measurements: Iterable[Measured], metric: str | None = None, *, at_sites: bool = False
) -> MainScore | None:
    """Return a run's main score (or `metric`), or None if it was not measured.

    A run of a method with own models is measured by these. Figures of the central data set and of sites' own data are
    not mixed: sites count if no version was measured centrally or, with `at_sites`, if any site measured.
    """
    found = list(measurements)
    central = [one for one in found if not one.held_out]
    of_sites = [one for one in found if one.held_out]
    chosen = of_sites if not central or (at_sites and of_sites) else central
    candidates = [(metric, chosen)] if metric else [(name, chosen) for name in main_names(found)]
    # A central evaluator measures no site's own model.
    for name, measured in [(n, of_sites if n.startswith(PERSONAL) else which) for n, which in candidates]:
        scores: dict[int, dict[str, Score]] = {}
        for one in measured:
            if name in one.metrics and one.labels:
                worker = one.worker if one.held_out else ""
                scores.setdefault(one.version, {})[worker] = score_of(one, name)
        if scores:
            every = [score for by_worker in scores.values() for score in by_worker.values()]
            # A mean of sites and a score of the pooled examples say nothing about each other.
            counts = [score.counts for score in every]
            if any(counts) and not can_pool(counts):
                scores = {v: {w: s._replace(counts=None) for w, s in of.items()} for v, of in scores.items()}
            values = {number: over_sites(name, by_worker.values()) for number, by_worker in sorted(scores.items())}
            return MainScore(name, values, scores, central=measured is central)
    return None


def different_sites(scores: Iterable[MainScore]) -> str:
    """Return a sentence if not all values of these scores are over the same sites, else nothing."""
    over = {frozenset(_sites_of(by_worker)) for one in scores if not one.central for by_worker in one.scores.values()}
    if len(over) < 2:
        return ""
    counts, every = sorted(map(len, over)), len(frozenset[str]().union(*over))
    return f"not all values are over the same sites: each is over {counts[0]} to {counts[-1]} of {every}"


def best_version(
    measurements: Iterable[Measured],
    among: Iterable[int] | None = None,
    metric: str | None = None,
    *,
    at_sites: bool = False,
) -> BestVersion | None:
    """Return the version with the best main score (or `metric`), if any was evaluated; `among` limits the choice.

    In order, a version replaces the best so far if it is better at the sites that both have, on the same data: means
    over different sites say nothing about the versions. A version that shares no site with the best so far replaces
    it if no fewer sites measured it, so that a site which left does not keep an early version the best.
    """
    main = main_score(measurements, metric, at_sites=at_sites)
    return best_of(main, among) if main else None


def best_of(main: MainScore, among: Iterable[int] | None = None) -> BestVersion | None:
    """Return the best version by a main score, as `best_version` does."""
    wanted = sorted(main.scores.keys() if among is None else main.scores.keys() & set(among))
    if not wanted:
        return None
    number, compared = wanted[0], set[str]()
    for other in wanted[1:]:
        best, new = main.scores[number], main.scores[other]
        pairs = list(_pairs(best, new))
        both = {score.site for _, score in pairs}
        if pairs:
            later = over_sites(main.name, (score for _, score in pairs))
            # The same weights for both, also if a data set has grown between them.
            earlier = over_sites(main.name, (old._replace(labels=score.labels) for old, score in pairs))
            replaces = later < earlier if is_better_low(main.name) else later > earlier
        else:
            replaces = len(_sites_of(new)) >= len(_sites_of(best))
        number, compared = (other, both) if replaces else (number, compared | both)
    best = main.scores[number]
    sites = compared or _sites_of(best)
    value = over_sites(main.name, (score for score in best.values() if score.site in sites))
    if main.central:
        return BestVersion(number, main.name, main.title, value)
    every = set[str]().union(*map(_sites_of, main.scores.values()))
    return BestVersion(number, main.name, main.title, value, tuple(sorted(sites)), len(every))


def _pairs(first: Mapping[str, Score], second: Mapping[str, Score]) -> Iterator[tuple[Score, Score]]:
    """Yield the scores that two versions have of the same worker, which has data of its own; of a site that both have
    without a common worker, those of the site."""
    common = sorted(first.keys() & second.keys())
    yield from ((first[worker], second[worker]) for worker in common)
    for site in sorted((_sites_of(first) & _sites_of(second)) - {first[worker].site for worker in common}):
        one, other = ([score for score in scores.values() if score.site == site] for scores in (first, second))
        yield joined(one), joined(other)


def _sites_of(scores: Mapping[str, Score]) -> set[str]:
    return {score.site for score in scores.values()}


# ---------------------------------------------------------------- several runs


def totals(costs: Sequence[RoundCost]) -> tuple[dict[int, int], dict[int, float]]:
    """Return the bytes and the seconds from the run's start to each version, abandoned attempts included."""
    moved = accumulate(cost.bytes for cost in costs)
    lasted = accumulate(cost.seconds for cost in costs)
    made = [(c.version, b, s) for c, b, s in zip(costs, moved, lasted, strict=True) if c.version is not None]
    return {0: 0} | {n: count for n, count, _ in made}, {0: 0.0} | {n: seconds for n, _, seconds in made}


@dataclass(frozen=True)
class History:
    """A run with its rounds and measurements."""

    run: Run
    costs: Sequence[RoundCost]
    """Of each attempt that has ended, in order."""
    measurements: Sequence[Measured]
    every: Sequence[Measured] | None = None
    """The scores of all evaluations, for the best version, if `measurements` are some of them."""
    clock: Clock = "wall"

    @classmethod
    def of(
        cls, run: Run, rounds: Iterable[Round], measurements: Iterable[Measurement], clock: Clock = "wall"
    ) -> Self:
        found, costs, spent = list(measurements), list[RoundCost](), 0.0
        evaluated = evaluation_bytes(found, run.spec.rounds)
        for one in rounds:
            if one.closed_at:
                seconds = (one.closed_at - one.opened_at).total_seconds()
                spent += seconds
                since = spent if clock == "rounds" else (one.closed_at - run.created_at).total_seconds()
                down = evaluated[one.number, one.attempt] + sum(task.download_bytes for task in one.tasks)
                costs.append(RoundCost(one.version, down, sum(t.upload_bytes for t in one.tasks), seconds, since))
        return cls(run, costs, found, clock=clock)

    def curve(self, metric: str | None = None, *, at_sites: bool = False) -> Curve | None:
        """Return the main score (or `metric`) of each measured version, with its cost; None without any."""
        main = main_score(self.every or self.measurements, metric, at_sites=at_sites)
        return Curve.of(main.name, main.title, main.values, self.costs, self.clock) if main else None

    def convergence(self, scores: Sequence[float] = (), metric: str | None = None) -> Convergence | None:
        """Return the cost of some scores, by default of shares of the best; None if no version was measured."""
        curve = self.curve(metric)
        return curve.convergence(scores) if curve else None


@dataclass(frozen=True)
class ComparedRun:
    """One of the compared runs. Mappings are by version; bytes and seconds are totals from the run's start,
    abandoned attempts included."""

    id: str
    name: str
    """Its name, with the beginning of its id if another of the runs has the same name."""
    state: str
    version: int
    best: BestVersion | None
    metric: str | None
    """The metric of its `scores`: of a method with own models that of these."""
    title: str | None
    """The name of its scores' values."""
    central: bool
    """True if the scores are of the central data set."""
    remark: str
    """A sentence if not all of its scores are over the same sites, else nothing."""
    scores: Mapping[int, float]
    bytes: Mapping[int, int]
    """Downloaded and uploaded by all its workers."""
    seconds: Mapping[int, float]
    """Of its rounds; pauses and the time between rounds do not count."""
    convergence: Convergence | None = None
    """With the same levels as the other runs'; None without scores."""


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side."""

    metric: str | None
    """The score that is compared; None if no run has been evaluated."""
    runs: tuple[ComparedRun, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """The settings that differ, by their dotted names: the value of each run, None where it has no such setting."""

    @property
    def title(self) -> str | None:
        """The name of the values of its metric."""
        titles = {run.title for run in self.runs if run.title}
        if not self.metric or len(titles) == 1:
            return titles.pop() if titles else self.metric
        return name_over_sites(self.metric)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return remarks on the scores for people."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        measured = [run for run in self.runs if run.best]
        if {"dataset", "evaluation.dataset", "evaluation.sites"} & {*self.settings}:
            yield "the runs differ in their data or in their evaluation: their scores are not of the same examples"
        elif len({run.central for run in measured}) > 1:
            central = ", ".join(run.name for run in measured if run.central)
            yield f"{central}: measured on central data, the others at sites; the scores are not of the same examples"
        elif len({run.best.sites for run in measured if run.best}) > 1:
            places = "; ".join(f"{run.name} {run.best.where}" for run in measured if run.best)
            yield f"the best versions were compared at different sites, and their scores are not comparable: {places}"
        titles = {run.title for run in self.runs if run.title and not run.central}
        if self.metric and titles == {self.metric, name_over_sites(self.metric)} and len(titles) > 1:
            pooled_runs = ", ".join(run.name for run in self.runs if run.title == self.metric)
            yield f"{pooled_runs}: of all examples together, the others the mean of sites: these are not comparable"
        for run in self.runs:
            if run.remark:
                yield f"{run.name}: {run.remark}; {PAIRWISE}"
        own = [run.name for run in self.runs if run.metric != self.metric and (run.metric or "").startswith(PERSONAL)]
        if own:
            yield f"{', '.join(own)}: measured by the sites' own models, the others by their versions at sites"

    @property
    def versions(self) -> list[int]:
        """Return the versions that any of the runs has made or measured."""
        return sorted({number for run in self.runs for number in (*run.bytes, *run.scores)})


def compare(histories: Sequence[History], metric: str | None = None, reach: Sequence[float] = ()) -> RunComparison:
    """Compare runs by `metric`, or by the main score of the first run that has one; the best version of each is then
    that of its own main score. `reach` are scores to reach, by default shares of the best value of all runs.

    If a run is measured by its sites' own models, the others are measured at sites too, as far as they were.
    """
    at_sites = metric is None and any(has_own_models(history.measurements) for history in histories)
    mains = (main_score(history.measurements, metric, at_sites=at_sites) for history in histories)
    found = list(dict.fromkeys(main.name for main in mains if main))
    # Beside each other, own models and versions are compared by the scores that both have.
    shown = found[0] if len(found) == 1 else found[0].removeprefix(PERSONAL) if found else None
    names = Counter(history.run.spec.name for history in histories)
    runs = tuple(
        _compared(history, metric, shown, at_sites=at_sites, twice=names[history.run.spec.name] > 1)
        for history in histories
    )
    curves = [
        history.curve(run.metric, at_sites=at_sites) if run.metric else None
        for history, run in zip(histories, runs, strict=True)
    ]
    if shown and (bests := [curve.best for curve in curves if curve]):
        best = (min if is_better_low(shown) else max)(bests)
        runs = tuple(
            replace(run, convergence=curve.convergence(reach, best)) if curve else run
            for run, curve in zip(runs, curves, strict=True)
        )
    return RunComparison(shown, runs, differing([history.run.spec for history in histories]))


def _compared(history: History, metric: str | None, shown: str | None, *, at_sites: bool, twice: bool) -> ComparedRun:
    run = history.run
    own = metric is None and shown in MAIN_SCORES and has_own_models(history.measurements)
    name = f"{PERSONAL}{shown}" if own else shown
    main = main_score(history.measurements, name, at_sites=at_sites) if name else None
    moved, lasted = totals(history.costs)
    every = history.measurements if history.every is None else history.every
    return ComparedRun(
        id=run.id,
        name=f"{run.spec.name} ({run.id[:8]})" if twice else run.spec.name,
        state=run.shown_state,
        version=run.version.number,
        best=best_version(every, metric=metric, at_sites=at_sites),
        metric=main.name if main else None,
        title=main.title if main else None,
        central=bool(main and main.central),
        remark=different_sites([main]) if main else "",
        scores=main.values if main else {},
        bytes=moved,
        seconds=lasted,
    )


def differing(specs: Sequence[RunSpec]) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which runs differ, by their dotted names, with the value of each run."""
    flat = [dict(_flat(spec.model_dump(mode="json", exclude={"name"}))) for spec in specs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = {name: tuple(settings.get(name) for settings in flat) for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def setting_text(value: Any) -> str:
    """Return a setting's value for people: a list without brackets, and of a digest the beginning, which is enough to
    see that two differ."""
    if isinstance(value, str):
        return f"{value[:19]}..." if value.startswith("sha256:") else value
    return ", ".join(map(setting_text, value)) if isinstance(value, list | tuple) else json.dumps(value)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
