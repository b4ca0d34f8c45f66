"""The report of the tables, from the raw results: tables, claims with their verdicts, and plots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.document import EVIDENCE, write_block
from benchmarks.evidence.gate import shut
from benchmarks.evidence.plan import (
    SITES,
    Arm,
    Claim,
    Job,
    Plan,
    Setting,
    Table,
    choice,
    tried,
    tuned_cell,
)
from benchmarks.evidence.statistics import (
    Trend,
    described,
    equivalence_p,
    floor,
    holm,
    paired,
    shown_interval,
    shown_spread,
    trend,
)
from benchmarks.evidence.store import job_of
from tessera.shared.methods.fedfrozen import DISAGREEMENT, FROZEN_FROM, MOVEMENT

COMMAND = "python -m benchmarks.evidence"
NOT_FLAT = "not flat"

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

    def final(self, part: str, score: str | None = None, *, worst: bool = False, absent: bool = False) -> ByUnit:
        """Return the mean of the last versions, on all examples of a part. Sites count alike; or the worst one, or
        those alone that missed rounds."""
        found = {}
        for seed, run in self.runs.items():
            rows = [row for row in run.get("scores", ()) if row["part"] == part and not row["curve"]]
            versions = sorted({row["version"] for row in rows})[-self.plan.protocol.final_versions :]
            by_site: dict[str, list[float]] = {}
            for row in rows:
                if row["version"] in versions and (not absent or row["site"] in run["absent"]):
                    by_site.setdefault(row["site"], []).append(100 * row[score or self.table.score])
            means = [fmean(values) for values in by_site.values()]
            if means:
                found[seed] = min(means) if worst else fmean(means)
            elif run.get("diverged"):
                found[seed] = 0.0
        return found

    def curves(self, part: str) -> dict[int, list[float]]:
        """Return the score of every version, by seed: on the examples of curves, or as the mean over the sites that
        measured every version."""
        found, versions = {}, (self.setting.rounds or self.table.rounds) + 1
        for seed, run in self.runs.items():
            by_site: dict[str, dict[int, float]] = {}
            for row in run.get("scores", ()):
                if row["part"] == part and (row["curve"] or part == SITES):
                    by_site.setdefault(row["site"], {})[row["version"]] = 100 * row[self.table.score]
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
        curves = list(self.curves(self.part).values())
        last = self.plan.protocol.rising_versions
        if not curves or len(curves[0]) < last:
            return None
        return trend([fmean(values) for values in zip(*curves, strict=True)][-last:])

    @property
    def is_rising(self) -> bool:
        """True if nothing may be concluded from the row, because it has not come to rest."""
        return self.trend is not None and self.trend.slope > self.plan.protocol.rising_points

    @property
    def jitter(self) -> list[float]:
        """The standard deviation of the last versions about their own line, of each seed."""
        last = self.plan.protocol.rising_versions
        return [trend(values[-last:]).jitter for values in self.curves(self.part).values() if len(values) >= last]

    def up(self) -> list[float]:
        """Return the megabytes that all sites together sent in a run, by seed."""
        return [sum(run["upload_bytes"]) / 1e6 for run in self.runs.values() if "upload_bytes" in run]

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
        return [min(end, default=float(self.setting.rounds or self.table.rounds)) for end in ends]

    def _signal(self, seed: int, name: str) -> dict[int, float]:
        """Return a measured value of a warm-up by version."""
        return {
            each["version"]: each["value"] for each in self.runs[seed].get("signals") or () if each["name"] == name
        }


def row(plan: Plan, found: Found, name: str, setting: Setting, arm: Arm) -> Row:
    """Return the row of an arm, of the runs at the learning rate that was chosen for it."""
    cell, tuning = (name, setting.name, arm.name), plan.protocol.tuning_seed
    rate = choice(plan, {job: figures["score"] for job, figures in found.items() if job.seed == tuning}, cell)
    runs = {
        job.seed: figures
        for job, figures in sorted(found.items(), key=lambda each: each[0].seed)
        if (job.table, job.setting, job.arm) == cell and job.seed != tuning and rate in (None, job.rate)
    }
    return Row(plan, name, plan.tables[name], setting, arm, runs)


# ---------------------------------------------------------------- what may be read


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
    return None


@dataclass(frozen=True)
class Finding:
    """A claim with the differences that it is about, in points, one for each seed that both arms have."""

    claim: Claim
    table: str
    differences: list[float]
    p: float | None
    """Of its test; None below two seeds."""
    hindrance: str | None
    """Why nothing follows."""
    adjusted: float | None = None
    """By Holm over the headline claims of its paper; None for others."""

    def verdict(self, significance: float) -> str:
        """Return what follows from the differences, in a word or some."""
        if self.hindrance:
            return self.hindrance
        if self.p is None:
            return "undecided: too few seeds"
        p, mean, margin = (
            self.p if self.adjusted is None else self.adjusted,
            fmean(self.differences),
            self.claim.margin,
        )
        if self.claim.kind == "equivalent":
            if p < significance:
                return "supported"
            low, high = described(self.differences)["low"], described(self.differences)["high"]
            return "refuted" if low > margin or high < -margin else "undecided"
        if p < significance:
            return "supported" if mean > 0 else "refuted: the other way round"
        if equivalence_p(self.differences, margin) < significance:
            return f"refuted: equal within {margin:g}"
        return "undecided"


def findings(plan: Plan, found: Found) -> list[Finding]:
    """Return every claim with its differences and p-values."""
    made = [_finding(plan, found, name, claim) for name, table in plan.tables.items() for claim in table.claims]
    families: dict[str, dict[str, float]] = {}
    for each in made:
        # Claims that are not tested yet count too: a family is as large as it was written down.
        if each.claim.headline:
            paper = plan.tables[each.table].paper
            families.setdefault(paper, {})[each.claim.name] = 1.0 if each.p is None or each.hindrance else each.p
    adjusted = {name: p for family in families.values() for name, p in holm(family).items()}
    return [replace(each, adjusted=adjusted.get(each.claim.name)) for each in made]


def _finding(plan: Plan, found: Found, name: str, claim: Claim) -> Finding:
    table = plan.tables[name]
    setting = table.setting(claim.setting) if claim.setting else table.concluding
    pair = [row(plan, found, name, setting, table.arm(arm)) for arm in (claim.arm, claim.against)]
    part = claim.part or table.part
    differences = paired(*(each.final(part, worst=claim.worst, absent=claim.absent) for each in pair))
    if not differences:
        return Finding(claim, name, differences, None, "not run")
    hindrance = "void" if void(plan, found, name, setting) else None
    if rising := [each.arm.name for each in pair if each.is_rising]:
        hindrance = hindrance or f"{NOT_FLAT}: {', '.join(rising)}"
    if len(differences) < 2:
        return Finding(claim, name, differences, None, hindrance)
    p = described(differences)["p"] if claim.kind == "greater" else equivalence_p(differences, claim.margin)
    return Finding(claim, name, differences, p, hindrance)


def flipped(full: Plan, found: Found, short: Plan, short_found: Found) -> list[str]:
    """Return the headline claims whose mean difference has another sign in the short check than in the full runs,
    where the interval of the full ones excludes 0."""
    known = {each.claim.name: each.differences for each in findings(full, found) if each.claim.headline}
    flips = []
    for each in findings(short, short_found):
        settled = known.get(each.claim.name, [])
        if len(settled) < 2 or not each.differences:
            continue
        low, high = described(settled)["low"], described(settled)["high"]
        mean = fmean(each.differences)
        if (low > 0 and mean < 0) or (high < 0 and mean > 0):
            flips.append(
                f"{each.claim.name}: {each.claim.arm} less {each.claim.against} is {mean:+.1f} here, and "
                f"{shown_interval(settled)} in the full runs"
            )
    return flips


# ---------------------------------------------------------------- lines


def lines(plan: Plan, found: Found, tables: Collection[str] = ()) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    for name, table in plan.tables.items():
        if not tables or name in tables:
            yield from _of_table(plan, found, name, table)
    yield from _claims(plan, found, tables)
    yield from _questions(plan, found)


def _of_table(plan: Plan, found: Found, name: str, table: Table) -> Iterator[str]:
    yield f"\n### {name}: {table.title}\n"
    yield table.question
    of_table = {job: figures for job, figures in found.items() if job.table == name}
    rows = [job for job in of_table if job.seed != plan.protocol.tuning_seed]
    yield (
        f"\n{len(rows)} runs, and {len(of_table) - len(rows)} that chose learning rates. {table.rounds} rounds of "
        f"{table.training.get('steps')} steps of {table.training.get('batch_size')}, "
        f"{table.sites_a_round or 'all'} sites a round."
    )
    run = {job.setting for job in rows}
    for setting in table.settings:
        if setting.name in run:
            yield from _of_setting(plan, found, name, setting)
    if missing := [setting.name for setting in table.settings if setting.name not in run]:
        yield f"\nSettings that were not run: {', '.join(missing)}."
    if len(rows) < len(of_table):
        yield from _rates(plan, of_table, name)
    yield from _costs(of_table)


def _of_setting(plan: Plan, found: Found, name: str, setting: Setting) -> Iterator[str]:
    table = plan.tables[name]
    yield f"\n#### {name}, {setting.name}\n"
    if reason := void(plan, found, name, setting):
        yield f"**Void**: {reason}.\n"
    rows = [each for arm in table.arms_of(setting) if (each := row(plan, found, name, setting, arm)).runs]
    reference = row(plan, found, name, table.reference_of(setting), table.arm(table.reference))
    parts = list(dict.fromkeys(part["part"] for part in next(iter(rows[0].runs.values()))["majority"]))
    parts.sort(key=lambda part: (part != table.part, part == SITES))
    budgets = _budgets(plan, found, name, setting)
    heads = [_head(part, table) for part in parts]
    equal = [f"{parts[0]} at the bytes of {table.equal_bytes}"] if budgets else []
    heads += ["worst site", f"{parts[0]} less {table.reference}", "slope", "jitter", "MB up", *equal, "CPU s"]
    yield f"| arm | seeds | {' | '.join(heads)} |"
    yield f"|{'---|' * (len(heads) + 2)}"
    most = {
        each["part"]: 100 * each[_score(each["part"], table)]
        for each in next(iter(rows[0].runs.values()))["majority"]
    }
    shares = " | ".join(f"{most[part]:.1f}" for part in parts)
    yield f"| most frequent class | | {shares} |{' |' * (len(heads) - len(parts))}"
    for each in rows:
        cells = [each.arm.name, str(len(each.runs))]
        cells += [shown_spread([*each.final(part, _score(part, table)).values()]) for part in parts]
        cells.append(shown_spread([*each.final(SITES, "accuracy", worst=True).values()]))
        own = each.arm.name == table.reference
        cells.append("" if own else shown_interval(paired(each.final(table.part), reference.final(table.part))))
        slope = (
            "-" if each.trend is None else f"{each.trend.slope:+.2f}" + (f", {NOT_FLAT}" if each.is_rising else "")
        )
        cells += [slope, shown_spread(each.jitter, 2), shown_spread(each.up(), 0)]
        cells += [shown_spread([*each.at_bytes(budgets).values()])] if budgets else []
        cells.append(shown_spread([run["cpu_seconds"] for run in each.runs.values()], 0))
        yield f"| {' | '.join(cells)} |"
    shown = {each.arm.name for each in rows}
    if missing := [arm.name for arm in table.arms_of(setting) if arm.name not in shown]:
        yield f"\nArms that were not run: {', '.join(missing)}."
    yield from _selections(rows)
    yield from _warmups(rows)


def _selections(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how the sites' selections of layers change and overlap, for the rows that select any."""
    found = {each.arm.name: figures for each in rows if (figures := each.of_selections())}
    if not found:
        return
    yield "\nSelections of layers: those that a site did not train the last time, of each round; the overlap of two"
    yield "sites' selections (Jaccard index), that of random ones of the same size, and the share of layers that any"
    yield "site trained.\n"
    yield "| arm | new layers | overlap | by chance | any site |"
    yield "|---|---|---|---|---|"
    for arm, figures in found.items():
        cells = [shown_spread(figures[name], 2) for name in ("turnover", "overlap", "chance", "union")]
        yield f"| {arm} | {' | '.join(cells)} |"


def _warmups(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was measured of warm-ups: their ends, and how far the sites' steps differ from their mean."""
    found = [each for each in rows if any(run.get("signals") for run in each.runs.values())]
    if not found:
        return
    yield "\nWarm-ups: rounds, and the disagreement of the sites (the rms distance of their steps from the mean step)"
    yield "over the mean step's length, on the blocks that the second stage would freeze.\n"
    yield "| arm | rounds | first five rounds | last five rounds |"
    yield "|---|---|---|---|"
    for each in found:
        drifts = list(each.drifts().values())
        cuts = slice(None, 5), slice(-5, None)
        ends = [shown_spread([fmean(part) for drift in drifts if (part := drift[cut])]) for cut in cuts]
        yield f"| {each.arm.name} | {shown_spread(each.warmups(), 0)} | {' | '.join(ends)} |"


def _head(part: str, table: Table) -> str:
    return f"{part}, {_score(part, table).replace('_', ' ')}"


def _score(part: str, table: Table) -> str:
    # A site has too few examples of most classes for a macro F1.
    return "accuracy" if part == SITES else table.score


def _budgets(plan: Plan, found: Found, name: str, setting: Setting) -> dict[int, float]:
    """Return the megabytes, both ways, that the table's measure of bytes took, by seed."""
    table = plan.tables[name]
    if table.equal_bytes is None:
        return {}
    measure = row(plan, found, name, setting, table.arm(table.equal_bytes))
    return {seed: totals[-1] for seed, totals in measure.moved().items()}


def _rates(plan: Plan, found: Found, name: str) -> Iterator[str]:
    """Yield the learning rates, by the validation score on the tuning seed."""
    scores = {job: figures["score"] for job, figures in found.items()}
    yield f"\n#### {name}, learning rates: validation score on seed {plan.protocol.tuning_seed}\n"
    yield "| arm | setting | chosen | tried |"
    yield "|---|---|---|---|"
    table = plan.tables[name]
    for setting in table.settings:
        for arm in table.arms_of(setting):
            cell = name, setting.name, arm.name
            of_cell = tried(plan, scores, cell)
            if of_cell and tuned_cell(plan, cell) == cell:
                rate, ends = choice(plan, scores, cell), (min(of_cell), max(of_cell))
                shown = "-" if rate is None else f"{rate:g}" + (", at an end" if rate in ends else "")
                values = ", ".join(f"{each:g}: {100 * score:.1f}" for each, score in sorted(of_cell.items()))
                yield f"| {arm.name} | {setting.name} | {shown} | {values} |"


def _costs(found: Found) -> Iterator[str]:
    """Yield what the runs took, by machine."""
    by_machine: dict[str, list[Run]] = {}
    for figures in found.values():
        by_machine.setdefault(figures["machine"], []).append(figures)
    for machine, of_machine in sorted(by_machine.items()):
        seconds, of_core = ([run[name] for run in of_machine] for name in ("seconds", "cpu_seconds"))
        yield (
            f"\n{len(of_machine)} runs took {shown_spread(seconds, 0)} seconds each, {shown_spread(of_core, 0)} of a "
            f"core, on {machine}."
        )


def _claims(plan: Plan, found: Found, tables: Collection[str]) -> Iterator[str]:
    protocol = plan.protocol
    made = [each for each in findings(plan, found) if not tables or each.table in tables]
    yield "\n### Claims\n"
    yield (
        "Differences are in points, paired by seed, with 95 % t-intervals; d_z has Hedges' correction. `p` is the "
        "exact sign-flip test's, and for an equivalence that of two one-sided t-tests. In bold: headline claims, "
        f"with p adjusted by Holm over those of the paper. Verdicts are at {protocol.significance:g}; rows that are "
        f"{NOT_FLAT} and void tables have none.\n"
    )
    yield "| claim | difference | seeds | positive | d_z | p | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for each in made:
        text = f"{each.claim.name} {each.claim.text}" + (
            f" (within {each.claim.margin:g})" if each.claim.kind == "equivalent" else ""
        )
        count, cells = len(each.differences), ["-", "-", "-"]
        if count > 1:
            about = described(each.differences)
            p = each.p if each.adjusted is None else each.adjusted
            size = "-" if count < 3 else f"{about['d_z']:+.2f}"
            cells = [f"{about['positive']} of {count}", size, "-" if p is None else f"{p:.3g}"]
        title = f"**{text}**" if each.claim.headline else text
        yield (
            f"| {title} | {shown_interval(each.differences)} | {count} | {' | '.join(cells)} | "
            f"{each.verdict(protocol.significance)} |"
        )


def _questions(plan: Plan, found: Found) -> Iterator[str]:
    """Yield the questions of the papers and of their reviewers, with what the claims answer."""
    if not plan.questions:
        return
    yield "\n### Questions of the papers and of their reviewers\n"
    yield "Differences are those of the claims, in points, with 95 % intervals."
    by_claim = {each.claim.name: each for each in findings(plan, found)}
    for paper in dict.fromkeys(question.paper for question in plan.questions):
        yield f"\n{paper}:\n"
        for question in plan.questions:
            if question.paper == paper:
                answers = [_answer(plan, by_claim[name]) for name in question.claims] or [question.answer]
                yield f"- *{question.text}* {' '.join(answers)}"


def _answer(plan: Plan, each: Finding) -> str:
    verdict = each.verdict(plan.protocol.significance)
    shown = f"{verdict}, {shown_interval(each.differences)}" if each.differences else verdict
    return f"{each.claim.text} ({each.claim.name}): {shown}."


def repeated_lines(repeated: Sequence[Run]) -> Iterator[str]:
    """Yield the results of runs that were repeated over HTTP."""
    yield "\n### Over HTTP\n"
    yield "`python -m benchmarks.evidence.over_http --save` repeats runs between real processes, a coordinator and a"
    yield "worker for each site, and compares the digests of the last versions.\n"
    yield from map(repeated_line, repeated)


def repeated_line(each: Mapping[str, Any]) -> str:
    """Return what was found of a repeated run, as an item of a list."""
    verdict = "the same digest" if each["digest"] == each["simulated"] else f"another digest than {each['simulated']}"
    return (
        f"- {job_of(each).name}: {verdict}, {each['digest']}; {each['received_bytes'] / 1e6:.0f} MB received and "
        f"{each['sent_bytes'] / 1e6:.0f} MB sent by the coordinator; {each['seconds']:.0f} s on {each['machine']}"
    )


# ---------------------------------------------------------------- the document and its plots


def section(plan: Plan, found: Found, digest: str, repeated: Sequence[Run] = ()) -> Iterator[str]:
    """Yield the document's part about the tables, line by line."""
    with_runs = [name for name in plan.tables if any(job.table == name for job in found)]
    missing = [name for name in plan.tables if name not in with_runs]
    yield f"Plan: `benchmarks/evidence.toml`, SHA-256 {digest}."
    if missing:
        yield f"No run is saved of {', '.join(missing)}."
    if with_runs:
        yield from lines(plan, found, with_runs)
        yield from (f"\n![{name}]({picture_name(name)})" for name in with_runs if drawable(plan, found, name))
    if repeated:
        yield from repeated_lines(repeated)


def write(plan: Plan, found: Found, digest: str, document: Path = EVIDENCE, repeated: Sequence[Run] = ()) -> None:
    """Write the part about the tables into the document, and their plots beside it."""
    write_block(COMMAND, section(plan, found, digest, repeated), document)
    for name in plan.tables:
        if drawable(plan, found, name):
            picture(plan, found, name, document.parent / picture_name(name))


def picture_name(name: str) -> str:
    return f"evidence-{name.lower()}.png"


def drawable(plan: Plan, found: Found, name: str) -> bool:
    """Return whether a row of the table has a curve to draw."""
    return any(_curved(plan, found, name))


def _curved(plan: Plan, found: Found, name: str) -> Iterator[Row]:
    table = plan.tables[name]
    settings = [table.concluding, table.settings[0]]
    drawn = next((s for s in settings if any((j.table, j.setting) == (name, s.name) for j in found)), settings[0])
    for arm in table.arms_of(drawn):
        each = row(plan, found, name, drawn, arm)
        if each.curves(each.part):
            yield each


def picture(plan: Plan, found: Found, name: str, out: Path) -> None:
    """Draw the curves of a table's rows, with bands of a standard error, and their final scores over bytes.

    The rows are those of the setting in which the table concludes, or else of its first.
    """
    table, rows = plan.tables[name], list(_curved(plan, found, name))
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for place, each in enumerate(rows):
        colour = "#000000" if each.arm.name == table.reference else colours[place % len(colours)]
        curves = list(each.curves(each.part).values())
        means = [fmean(values) for values in zip(*curves, strict=True)]
        errors = [stdev(v) / sqrt(len(v)) if len(v) > 1 else 0.0 for v in zip(*curves, strict=True)]
        left.plot(means, color=colour, lw=1.2, label=each.arm.name)
        ends = [[m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1)]
        left.fill_between(range(len(means)), *ends, color=colour, alpha=0.15, lw=0)
        finals, moved = [*each.final(each.part).values()], [totals[-1] for totals in each.moved().values()]
        if finals and moved and fmean(moved) > 0:
            error = stdev(finals) / sqrt(len(finals)) if len(finals) > 1 else 0.0
            right.errorbar(fmean(moved), fmean(finals), error, color=colour, marker="o", ms=4)
            right.annotate(
                each.arm.name, (fmean(moved), fmean(finals)), fontsize=7, xytext=(4, 2), textcoords="offset points"
            )
    left.set_xlabel("round")
    left.set_ylabel(_head(table.part, table))
    left.legend(frameon=False, fontsize=7, ncols=2)
    right.set_xscale("log")
    right.set_xlabel("MB, both ways, all sites and rounds")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=100)
