"""Rows of the tables: the runs of an arm in a setting, with the figures that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any, Literal

from common.names import DISAGREEMENT, FROZEN_FROM, MOVEMENT
from evidence.gate import shut
from evidence.jobs import Job, at_end, choice
from evidence.plan import SITES, Arm, Plan, Setting, Table
from evidence.statistics import Trend, floor, shown_interval, trend
from tessera.simulation.comparison.statistics import interval, paired

Found = Mapping[Job, Mapping[str, Any]]
Run = Mapping[str, Any]
ByUnit = dict[int, float]
"""A figure by seed, in points."""


@dataclass(frozen=True)
class Row:
    """The runs of an arm in a setting: its figures by seed, in points."""

    plan: Plan
    name: str
    table: Table
    setting: Setting
    arm: Arm
    runs: Mapping[int, Run]
    """By seed."""
    rate_at_end: bool = False
    """True if no rate beyond the chosen one was tried."""

    @property
    def rounds(self) -> int:
        return self.setting.rounds or self.table.rounds

    @property
    def diverged(self) -> list[int]:
        """The seeds whose training diverged. They count as 0."""
        return [seed for seed, run in self.runs.items() if run.get("diverged")]

    def final(self, part: str, score: str | None = None, *, worst: bool = False, absent: bool = False) -> ByUnit:
        """Return the mean of the final versions, on all examples of a part. Sites count alike; or the worst one, or
        those alone that missed rounds."""
        found = {}
        for seed, run in self.runs.items():
            means = self._of_sites(run, part, score or score_of(part, self.table), absent)
            if means:
                found[seed] = min(means) if worst else fmean(means)
            elif run.get("diverged"):
                found[seed] = 0.0
        return found

    def spread(self) -> ByUnit:
        """Return the standard deviation of the sites' accuracies about their mean, in the last versions."""
        means = {seed: self._of_sites(run, SITES, "accuracy") for seed, run in self.runs.items()}
        return {seed: pstdev(values) for seed, values in means.items() if values}

    def _of_sites(self, run: Run, part: str, score: str, absent: bool = False) -> list[float]:
        """Return each site's mean of the last versions; for a part of no site, one value."""
        rows = [row for row in run.get("scores", ()) if row["part"] == part and not row["curve"]]
        count = self.plan.final_count(self.table, self.rounds, part)
        versions = sorted({row["version"] for row in rows})[-count:]
        by_site: dict[str, list[float]] = {}
        for row in rows:
            if row["version"] in versions and (not absent or row["site"] in run["absent"]):
                by_site.setdefault(row["site"], []).append(100 * row[score])
        return [fmean(values) for values in by_site.values()]

    def zero_shot(self, part: str) -> ByUnit:
        """Return the score of the model before any training and without its prompts, if it has some."""
        score = score_of(part, self.table)
        return {
            seed: 100 * each[score]
            for seed, run in self.runs.items()
            for each in run.get("zero_shot") or ()
            if each["part"] == part
        }

    def curves(self, part: str) -> dict[int, list[float]]:
        """Return the score of every version, by seed: on the examples of curves, or as the mean over the sites that
        measured every version."""
        found, versions, score = {}, self.rounds + 1, score_of(part, self.table)
        for seed, run in self.runs.items():
            by_site: dict[str, dict[int, float]] = {}
            for row in run.get("scores", ()):
                if row["part"] == part and (row["curve"] or part == SITES):
                    by_site.setdefault(row["site"], {})[row["version"]] = 100 * row[score]
            whole = [values for values in by_site.values() if len(values) == versions]
            if whole:
                found[seed] = [fmean(values[version] for values in whole) for version in range(versions)]
        return found

    @cached_property
    def part(self) -> str:
        """The part that the table is about, or the sites for an arm that is measured there alone."""
        return SITES if self.arm.personal else self.table.part

    @cached_property
    def trend(self) -> Trend | None:
        """The line through the last versions of the mean curve; None before a run with a curve has ended."""
        curves, last = list(self.curves(self.part).values()), self._last
        if not curves or len(curves[0]) < last:
            return None
        return trend([fmean(values) for values in zip(*curves, strict=True)][-last:])

    @property
    def _last(self) -> int:
        """The number of last versions over which a slope is taken."""
        protocol = self.plan.protocol
        return max(protocol.rising_versions, round(protocol.rising_share * self.rounds))

    @property
    def is_rising(self) -> bool:
        """True if nothing may be concluded from the row, because it has not come to rest."""
        return self.trend is not None and self.trend.slope > self.plan.protocol.rising_points

    @property
    def jitter(self) -> ByUnit:
        """The standard deviation of the last versions about their own line, by seed."""
        last, curves = self._last, self.curves(self.part)
        return {seed: trend(values[-last:]).jitter for seed, values in curves.items() if len(values) >= last}

    def halfway(self, part: str) -> ByUnit:
        """Return the mean of the last versions of the first half of the rounds, on the examples of curves."""
        end, count = self.rounds // 2 + 1, self.plan.protocol.final_versions
        return {seed: fmean(values[max(0, end - count) : end]) for seed, values in self.curves(part).items()}

    def second_half(self, part: str) -> ByUnit:
        """Return the mean of all versions of the second half of the rounds, on the examples of curves."""
        return {seed: fmean(values[self.rounds // 2 + 1 :]) for seed, values in self.curves(part).items()}

    def megabytes(self, way: Literal["upload", "download"]) -> list[float]:
        """Return what all sites together sent or fetched in a run, by seed; nothing for one place with all data.

        Sites with models of their own fetch each version to measure it, which counts for nothing, and then have it:
        what they fetch to train is not comparable.
        """
        if self.arm.central or (way == "download" and self.arm.personal):
            return []
        return [sum(run[f"{way}_bytes"]) / 1e6 for run in self.runs.values() if f"{way}_bytes" in run]

    def moved(self) -> dict[int, list[float]]:
        """Return the megabytes that moved both ways until each version, from the first, by seed."""
        return {
            seed: [
                0.0,
                *accumulate((u + d) / 1e6 for u, d in zip(run["upload_bytes"], run["download_bytes"], strict=True)),
            ]
            for seed, run in self.runs.items()
            if "upload_bytes" in run
        }

    def at_bytes(self, budgets: Mapping[int, float]) -> ByUnit:
        """Return the score on the curve's examples of the last version within each seed's budget of megabytes."""
        moved, curves = self.moved(), self.curves(self.table.part)
        return {
            seed: curve[max(place for place, total in enumerate(moved[seed]) if total <= budgets[seed])]
            for seed, curve in curves.items()
            if seed in budgets and seed in moved
        }

    def of_selections(self) -> dict[str, list[float]]:
        """Return each figure of the runs' selections of layers, for every seed that has it; empty without any."""
        found: dict[str, list[float]] = {}
        for run in self.runs.values():
            for name, value in (run.get("selections") or {}).items():
                if value is not None:
                    found.setdefault(name, []).append(value)
        return found and {name: found.get(name, []) for name in ("turnover", "overlap", "chance", "union")}

    def drifts(self) -> dict[int, list[float]]:
        """Return, for each round of a warm-up, the disagreement of the sites over the length of their mean step."""
        found = {}
        for seed in self.runs:
            far, moved = self._signal(seed, DISAGREEMENT), self._signal(seed, MOVEMENT)
            found[seed] = [far[version] / moved[version] for version in sorted(far) if moved.get(version)]
        return found

    def warmups(self) -> list[float]:
        """Return the rounds of each run's warm-up: all of them for one that never ended."""
        ends = [self._signal(seed, FROZEN_FROM).values() for seed in self.runs]
        return [min(end, default=float(self.rounds)) for end in ends]

    def _signal(self, seed: int, name: str) -> dict[int, float]:
        """Return a measured value of a warm-up by version."""
        return {
            each["version"]: each["value"] for each in self.runs[seed].get("signals") or () if each["name"] == name
        }


def score_of(part: str, table: Table) -> str:
    """Return the score of a part that a table shows."""
    # A site has too few examples of most classes for a macro F1.
    return "accuracy" if part == SITES else table.score


def row(plan: Plan, found: Found, name: str, setting: Setting, arm: Arm) -> Row:
    """Return the row of an arm, of the runs at the learning rate that was chosen for it."""
    cell, tuning = (name, setting.name, arm.name), plan.protocol.tuning_seed
    scores = {job: figures["score"] for job, figures in found.items() if job.seed == tuning}
    rate = choice(plan, scores, cell)
    runs = {
        job.seed: figures
        for job, figures in sorted(found.items(), key=lambda each: each[0].seed)
        if (job.table, job.setting, job.arm) == cell and job.seed != tuning and rate in (None, job.rate)
    }
    return Row(plan, name, plan.tables[name], setting, arm, runs, at_end(plan, scores, cell))


def void(plan: Plan, found: Found, name: str, setting: Setting) -> str | None:
    """Return why nothing follows from a table; None if its model passed the gate and its reference learned."""
    table = plan.tables[name]
    if reason := shut(table.gate_of(setting)):
        return reason
    reference = row(plan, found, name, table.reference_of(setting), table.arm(table.reference))
    accuracy = reference.final(table.part, "accuracy")
    if not accuracy:
        return f"no run of `{table.reference}` is finished"
    for seed, value in accuracy.items():
        most = next(each for each in reference.runs[seed]["majority"] if each["part"] == table.part)
        if value < 100 * floor(most["accuracy"], most["examples"], plan.protocol.standard_errors):
            return (
                f"`{table.reference}` has accuracy {value:.1f} with seed {seed}, less than "
                f"{plan.protocol.standard_errors:g} standard errors above the most frequent class"
            )
    starts = {"its first version": {seed: curve[0] for seed, curve in reference.curves(table.part).items()}}
    starts["zero-shot, without prompts"] = reference.zero_shot(table.part)
    for start, scores in starts.items():
        gains = paired(reference.final(table.part), scores)
        if len(gains) > 1 and interval(gains)[0] <= 0:
            return f"`{table.reference}` does not gain over {start}: {shown_interval(gains)}"
    return no_drift(plan, found, name, setting)


def drift(plan: Plan, found: Found, name: str) -> list[float]:
    """Return the points that the reference loses to the same runs without skew, for each seed that both have."""
    table = plan.tables[name]
    if table.alike is None:
        return []
    alike, skewed = (
        row(plan, found, name, setting, table.arm(table.reference)).final(table.part)
        for setting in (table.setting(table.alike), table.concluding)
    )
    return paired(alike, skewed)


def no_drift(plan: Plan, found: Found, name: str, setting: Setting) -> str | None:
    """Return why a setting with skew is not judged; None if the reference loses enough, or need lose nothing."""
    table, second = plan.tables[name], plan.protocol.second
    if table.alike in (None, setting.name) or second is None:
        return None
    lost = drift(plan, found, name)
    if not lost:
        return f"the drift gate is open: no seed of `{table.reference}` has run with and without skew"
    if fmean(lost) < second.drift_points:
        return (
            f"`{table.reference}` loses {fmean(lost):.1f} points to the same runs without skew, less than "
            f"{second.drift_points:g}"
        )
    return None
