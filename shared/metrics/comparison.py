"""A run's main score and best version, and several runs side by side."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

from tessera.shared.api.runs import Measurement, Round, Run, RunSpec
from tessera.shared.metrics.evaluation_bytes import evaluation_bytes
from tessera.shared.metrics.site_spread import is_better_low, scores_by_version

MAIN_SCORES = ("accuracy", "loss")
"""A run's main score is the first of these that was measured."""


@dataclass(frozen=True)
class BestVersion:
    """The version with the best score, the earliest of equal ones."""

    number: int
    metric: str
    value: float


def main_scores(
    measurements: Iterable[Measurement], metric: str | None = None
) -> tuple[str, dict[int, float]] | None:
    """Return a run's main score (or `metric`) with its values by version, or None if it was not measured.

    Figures of the central data set and of sites' own data are not mixed: sites count if no version was measured
    centrally.
    """
    names = (metric,) if metric else MAIN_SCORES
    by_version = scores_by_version(_counted(measurements), names)
    for name in names:
        values = {number: scores[name] for number, scores in sorted(by_version.items()) if name in scores}
        if values:
            return name, values
    return None


def best_version(
    measurements: Iterable[Measurement], among: Iterable[int] | None = None, metric: str | None = None
) -> BestVersion | None:
    """Return the version with the best main score (or `metric`), if any was evaluated; `among` limits the choice.

    A version that fewer sites have measured than another is passed over: the mean over an easy site alone says
    nothing about the others.
    """
    found = _counted(measurements)
    if not (main := main_scores(found, metric)):
        return None
    name, values = main
    sites = Counter({number: len(of) for number, of in _sites(found, name).items()})
    wanted = set(values) if among is None else set(values) & set(among)
    most = max((sites[number] for number in wanted), default=0)
    ranked = sorted(number for number in wanted if sites[number] == most)
    if not ranked:
        return None
    number = (min if is_better_low(name) else max)(ranked, key=values.__getitem__)
    return BestVersion(number, name, values[number])


def _counted(measurements: Iterable[Measurement]) -> list[Measurement]:
    found = list(measurements)
    return [one for one in found if not one.held_out] or found


def _sites(measurements: Iterable[Measurement], metric: str) -> dict[int, set[str]]:
    """Return the sites that measured each version on their own data; none on central data."""
    by_version: dict[int, set[str]] = {}
    for one in measurements:
        if one.held_out and metric in one.metrics:
            by_version.setdefault(one.version, set()).add(one.site)
    return by_version


# ---------------------------------------------------------------- several runs


class RoundCost(NamedTuple):
    """The cost of one attempt at a round; `version` is the number of the version that it made, if it made one."""

    version: int | None
    bytes: int
    seconds: float


def totals(costs: Sequence[RoundCost]) -> tuple[dict[int, int], dict[int, float]]:
    """Return the bytes and the seconds from the run's start to each version, with those of abandoned attempts."""
    moved = accumulate(cost.bytes for cost in costs)
    lasted = accumulate(cost.seconds for cost in costs)
    made = [(c.version, b, s) for c, b, s in zip(costs, moved, lasted, strict=True) if c.version is not None]
    return {0: 0} | {n: count for n, count, _ in made}, {0: 0.0} | {n: seconds for n, _, seconds in made}


@dataclass(frozen=True)
class History:
    """A run with what happened in it."""

    run: Run
    costs: Sequence[RoundCost]
    """Of each attempt that has ended, in order."""
    measurements: Sequence[Measurement]

    @classmethod
    def of(cls, run: Run, rounds: Iterable[Round], measurements: Iterable[Measurement]) -> Self:
        found = list(measurements)
        evaluated = evaluation_bytes(found, run.spec.rounds)
        costs = [
            RoundCost(
                one.version,
                evaluated[one.number, one.attempt] + sum(t.download_bytes + t.upload_bytes for t in one.tasks),
                (one.closed_at - one.opened_at).total_seconds(),
            )
            for one in rounds
            if one.closed_at
        ]
        return cls(run, costs, found)


@dataclass(frozen=True)
class ComparedRun:
    """One of the compared runs. Mappings are by version; bytes and seconds are totals from the run's start, with
    those of abandoned attempts."""

    id: str
    name: str
    """Its name, with the beginning of its id if another of the runs has the same name."""
    state: str
    version: int
    best: BestVersion | None
    scores: Mapping[int, float]
    bytes: Mapping[int, int]
    """Downloaded and uploaded by all its workers."""
    seconds: Mapping[int, float]
    """Of its rounds; pauses and the time between rounds do not count."""


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    metric: str | None
    """The score that is compared; None if no run has been evaluated."""
    runs: tuple[ComparedRun, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """The settings that differ, by their dotted names: the value of each run, None where it has no such setting."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return remarks on the scores for people."""
        if {"dataset", "evaluation.dataset", "evaluation.sites"} & {*self.settings}:
            return (
                "the runs differ in their data or in their evaluation: their scores are not of the same examples",
            )
        return ()

    @property
    def versions(self) -> list[int]:
        """Return the versions that any of the runs has made or measured."""
        return sorted({number for run in self.runs for number in (*run.bytes, *run.scores)})


def compare(histories: Sequence[History], metric: str | None = None) -> Comparison:
    """Compare runs by `metric`, or by the main score of the first run that has one; the best version of each is then
    that of its own main score."""
    mains = (main_scores(history.measurements, metric) for history in histories)
    shown = next((main[0] for main in mains if main), None)
    names = Counter(history.run.spec.name for history in histories)
    runs = tuple(_compared(history, metric, shown, twice=names[history.run.spec.name] > 1) for history in histories)
    return Comparison(shown, runs, differing([history.run.spec for history in histories]))


def _compared(history: History, metric: str | None, shown: str | None, *, twice: bool) -> ComparedRun:
    run = history.run
    main = main_scores(history.measurements, shown) if shown else None
    moved, lasted = totals(history.costs)
    return ComparedRun(
        id=run.id,
        name=f"{run.spec.name} ({run.id[:8]})" if twice else run.spec.name,
        state=run.state,
        version=run.version.number,
        best=best_version(history.measurements, metric=metric),
        scores=main[1] if main else {},
        bytes=moved,
        seconds=lasted,
    )


def differing(specs: Sequence[RunSpec]) -> dict[str, tuple[Any, ...]]:
    """Return the settings in which runs differ, by their dotted names, with the value of each run."""
    flat = [dict(_flat(spec.model_dump(mode="json", exclude={"name"}))) for spec in specs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = {name: tuple(settings.get(name) for settings in flat) for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
