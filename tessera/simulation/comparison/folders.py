"""Finished simulations beside each other, paired by seed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self

from tessera.shared.metrics.convergence import COSTS, Curve, ScoreCost
from tessera.shared.metrics.site_spread import PERSONAL, is_better_low
from tessera.shared.near_names import absent, did_you_mean
from tessera.shared.problems import Invalid
from tessera.simulation.checkpoint import SETTINGS, differences
from tessera.simulation.comparison.statistics import MOST_FLIPPED, equivalence_p, holm, interval, paired, sign_flip_p
from tessera.simulation.summary import SUMMARY, curve_of, figures_of, not_in_all, remarks_on

REMEDY = "Give an output folder of `tessera simulate`."

SEEDS = "0,1,2,3,4,5"
"""Of fewer than six seeds the p-value of a sign-flip test is never below 0.05."""
PAIRED_BY = ("/spec/seed", "/spec/name")
"""Settings that may differ."""


@dataclass(frozen=True)
class FinishedSimulation:
    """A simulation that ended, of one seed."""

    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    """The settings that determine its results."""

    @cached_property
    def figures(self) -> dict[str, float]:
        return figures_of(self.summary)


def finished(folder: Path) -> dict[int, FinishedSimulation]:
    """Return the simulations that ended in a folder of `tessera simulate`, by seed.

    Raises Invalid without any, and for one that cannot be read.
    """
    if not folder.exists():
        raise Invalid(absent(folder), remedy=REMEDY)
    found = {}
    for each in (folder, *sorted(folder.glob("seed-*"))):
        if (each / SUMMARY).is_file() and (each / SETTINGS).is_file():
            one = _read(each)
            found[one.summary["seed"]] = one
    if not found:
        raise Invalid(
            f"{folder} has no finished simulation",
            remedy=f"{REMEDY} If that was stopped, repeat its command.",
        )
    return dict(sorted(found.items()))


def _read(folder: Path) -> FinishedSimulation:
    with suppress(ValueError, LookupError, TypeError, AttributeError, OSError):
        summary, settings = (json.loads((folder / name).read_text("utf-8")) for name in (SUMMARY, SETTINGS))
        one = FinishedSimulation(summary, settings)
        if one.figures and isinstance(summary["seed"], int):
            return one
    raise Invalid(
        f"{folder} has a {SUMMARY} or {SETTINGS} that `tessera simulate` did not write",
        remedy="Remove the folder and simulate again.",
    )


@dataclass(frozen=True)
class Figure:
    """One figure of a simulation, over the seeds."""

    mean: float | None
    """None if a seed lacks it: a score that it never reached."""
    deviation: float | None
    """The standard deviation; None of one seed."""
    difference: float | None = None
    """Less that of the first simulation, the mean over the seeds; None for the first one itself."""
    low: float | None = None
    high: float | None = None
    """The ends of the difference's 95 % interval, None of one seed."""
    p: float | None = None
    """Of the exact sign-flip test that the difference is 0; None of one seed, and of more than `MOST_FLIPPED`."""
    holm_p: float | None = None
    """The same, adjusted by Holm for all simulations that are compared with the first by this figure."""
    equivalence_p: float | None = None
    """Of two one-sided t-tests that the difference is within the margin; None without a margin, or of one seed."""
    lacking: int = 0
    """The number of seeds without it."""

    @property
    def shown(self) -> str:
        """Its mean, or that the score was not reached."""
        never = f"never with {self.lacking} seed{'s' * (self.lacking > 1)}"
        return never if self.mean is None else f"{self.mean:.4f}"


@dataclass(frozen=True)
class SimulationComparison:
    """Simulations on the seeds that all of them have."""

    folders: Mapping[str, Mapping[int, FinishedSimulation]]
    seeds: Sequence[int]
    reach: Sequence[float] = ()
    """Scores to reach, by default shares of the best folder's mean of its seeds' best values."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """By figure, the difference within which two simulations count as equal."""

    @classmethod
    def of(
        cls, folders: Sequence[Path], reach: Sequence[float] = (), margins: Mapping[str, float] | None = None
    ) -> Self:
        """Read the simulations of some folders. Raises Invalid for one without any, if no seed is in all, and for a
        margin of a figure that not all have, or with one seed."""
        read = {str(folder): finished(folder) for folder in folders}
        if not (common := sorted(set.intersection(*(set(each) for each in read.values())))):
            seeds = "; ".join(f"{name} has {', '.join(map(str, each))}" for name, each in read.items())
            raise Invalid(f"no seed is in all folders: {seeds}", remedy="Simulate with the same `--seeds` in each.")
        if margins and len(common) == 1:
            raise Invalid(
                f"a margin cannot be tested with one seed, {common[0]}",
                remedy=f"Repeat all simulations with `--seeds {SEEDS}`.",
            )
        found = cls(read, common, reach, margins or {})
        for name in found.margins:
            if name not in (known := found.figures()):
                raise Invalid(
                    f"not all simulations have the figure {name!r}{did_you_mean(name, known)}",
                    remedy="Give the margin of a figure in the table.",
                )
        return found

    def left_out(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the folders that have other seeds too, and these."""
        for name, found in self.folders.items():
            if others := sorted(set(found) - set(self.seeds)):
                yield name, others

    def remarks(self) -> Iterator[str]:
        """Yield remarks for a reader of the figures: their meaning, and the figures that some simulations lack."""
        for name, found in self.folders.items():
            said = {remark: None for seed in self.seeds for remark in remarks_on(found[seed].summary)}
            yield from (f"{name}: {remark}" for remark in said)
        if self.reach and not self.curves:
            yield "the cost of a score is left out: not all simulations have measured versions of the same score"
        lacking = not_in_all(self._every)
        for name, found in self.folders.items():
            if has := [each for each in lacking if all(each in found[seed].figures for seed in self.seeds)]:
                yield f"{name}: not in all simulations, and left out: {', '.join(has)}"

    @cached_property
    def curves(self) -> dict[str, dict[int, Curve]]:
        """The curves of each folder, by seed; empty unless all have one, of one score."""
        found = {name: {seed: curve_of(of[seed].summary) for seed in self.seeds} for name, of in self.folders.items()}
        known = {name: {seed: curve for seed, curve in each.items() if curve} for name, each in found.items()}
        metrics = {curve.metric.removeprefix(PERSONAL) for each in known.values() for curve in each.values()}
        return known if known == found and len(metrics) == 1 else {}

    @cached_property
    def reached(self) -> dict[str, dict[int, tuple[ScoreCost, ...]]]:
        """The cost of each score, by folder and seed."""
        bests = [fmean(curve.best for curve in each.values()) for each in self.curves.values()]
        low = any(is_better_low(curve.metric) for each in self.curves.values() for curve in each.values())
        best = (min if low else max)(bests, default=0.0)
        return {
            name: {seed: curve.convergence(self.reach, best).reached for seed, curve in each.items()}
            for name, each in self.curves.items()
        }

    @property
    def _every(self) -> list[dict[str, float]]:
        return [found[seed].figures for found in self.folders.values() for seed in self.seeds]

    def settings(self) -> dict[str, list[Any]]:
        """Return the settings that differ on any seed, by their pointers: a value of each folder, in order."""
        found: dict[str, list[Any]] = {}
        for seed in self.seeds:
            given = [of_seed[seed].settings for of_seed in self.folders.values()]
            for pointer in (pointer for each in given[1:] for pointer, *_ in differences("", given[0], each)):
                if pointer not in PAIRED_BY:
                    found.setdefault(pointer, [_at(each, pointer) for each in given])
        return found

    def figures(self) -> dict[str, dict[str, Figure]]:
        """Return the figures that all simulations have, and the cost of each level, by name and then by folder."""
        lacking = not_in_all(self._every)
        of = {name: {seed: found[seed].figures for seed in self.seeds} for name, found in self.folders.items()}
        names = [name for name in self._every[0] if name not in lacking]
        found = {name: _figures(name, of, self.margins.get(name)) for name in names}
        costs = {name: {seed: _costs(each) for seed, each in of.items()} for name, of in self.reached.items()}
        levels = next((each for of in self.reached.values() for each in of.values()), ())
        return found | {
            name: _figures(name, costs, self.margins.get(name))
            for each in levels
            for name in (f"{w} to {each.text}" for w in COSTS)
        }


def _costs(reached: Sequence[ScoreCost]) -> dict[str, float]:
    return {f"{what} to {one.text}": value for one in reached for what, value in one.figures().items()}


def _figures(
    name: str, found: Mapping[str, Mapping[int, Mapping[str, float]]], margin: float | None = None
) -> dict[str, Figure]:
    figures = dict(_tested(name, found, margin))
    adjusted = holm({folder: figure.p for folder, figure in figures.items() if figure.p is not None})
    return figures | {folder: replace(figures[folder], holm_p=p) for folder, p in adjusted.items()}


def _tested(
    name: str, found: Mapping[str, Mapping[int, Mapping[str, float]]], margin: float | None
) -> Iterator[tuple[str, Figure]]:
    first: dict[int, float] | None = None
    for folder, by_seed in found.items():
        values = {seed: figures[name] for seed, figures in by_seed.items() if name in figures}
        compared, first = first, values if first is None else first
        if len(values) < len(by_seed):
            yield folder, Figure(None, None, lacking=len(by_seed) - len(values))
            continue
        figure = Figure(fmean(values.values()), None if len(values) < 2 else stdev(values.values()))
        less = paired(values, compared) if compared is not None and len(compared) == len(values) else []
        figure = replace(figure, difference=fmean(less) if less else None)
        if len(less) > 1:
            low, high = interval(less)
            p = sign_flip_p(less) if len(less) <= MOST_FLIPPED else None
            within = None if margin is None else equivalence_p(less, margin)
            figure = replace(figure, low=low, high=high, p=p, equivalence_p=within)
        yield folder, figure


def _at(settings: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings
