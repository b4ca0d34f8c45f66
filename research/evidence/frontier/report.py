"""The tables and the plot of the frontier, from the figures of finished runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import isinf
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from common.document import table_head, table_row
from evidence.frontier.study import ARMS, FULL, SCORE, Job, Study, choices, tried
from evidence.statistics import STANDARD_ERRORS, floor, shown_interval, shown_spread
from tessera.simulation.comparison.statistics import CONFIDENCE, interval
from tessera.simulation.comparison.statistics import paired as differences

FLAT = "#777777"
COLOURS = ("#000000", "#1565c0", "#ef6c00", "#2e7d32", "#b71c1c", "#6a1b9a")

Found = Mapping[Job, Mapping[str, Any]]


def lines(study: Study, found: Found) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    table = {job: figures for job, figures in found.items() if not job.tunes}
    yield from _about(study, found)
    if said := void(table):
        yield f"\n**Void**: {said}."
    for epsilon in sorted({job.epsilon for job in table}):
        yield from _of_epsilon(study, {job: each for job, each in table.items() if job.epsilon == epsilon}, epsilon)
    yield from _against_random(study, table)
    yield from _rates(study, found)


def _about(study: Study, found: Found) -> Iterator[str]:
    tuning = sum(job.tunes for job in found)
    yield (
        f"{len(found) - tuning} runs, and {tuning} that chose learning rates. Scores in points: mean ± standard "
        f"deviation over seeds. Differences to `{FULL.name}` are paired by seed, with {CONFIDENCE:.0%} t-intervals."
    )
    where = Counter(_device(figures["machine"]) for figures in found.values())
    yield f"Runs by device: {', '.join(f'{count} on {device}' for device, count in sorted(where.items()))}."
    if measured := [figures for job, figures in found.items() if not job.tunes]:
        examples = [figures["examples"] for figures in measured]
        yield (
            f"Tested on {min(examples)} to {max(examples)} phrases of unseen categories. The most frequent class has "
            f"macro F1 {shown_spread([100 * figures['majority_f1'] for figures in measured])} and accuracy "
            f"{shown_spread([100 * figures['majority_accuracy'] for figures in measured])}."
        )


def _device(machine: Mapping[str, str]) -> str:
    return f"{machine['processor']} processors" if machine["gpu"] == "none" else machine["gpu"]


def void(table: Found) -> str | None:
    """Return why nothing follows from the table; None if full training without privacy learns the task."""
    runs = {job: figures for job, figures in table.items() if job.arm == FULL.name and isinf(job.epsilon)}
    if not runs:
        return f"no run of `{FULL.name}` without privacy is finished"
    for job, figures in runs.items():
        if figures["accuracy"] < floor(figures["majority_accuracy"], figures["examples"]):
            return (
                f"`{FULL.name}` without privacy has accuracy {100 * figures['accuracy']:.1f} with seed "
                f"{job.seed}, less than {STANDARD_ERRORS:g} standard errors above the most frequent class"
            )
    return None


def _of_epsilon(study: Study, table: Found, epsilon: float) -> Iterator[str]:
    yield f"\n### {_titled(study, epsilon)}\n"
    yield "| arm | seeds | macro F1 | accuracy | macro F1 less full | kB up |"
    yield "|---|---|---|---|---|---|"
    for arm in study.arms:
        of_arm = [figures for job, figures in table.items() if job.arm == arm.name]
        if of_arm:
            cells = [
                arm.name,
                str(len(of_arm)),
                *(shown_spread([100 * figures[name] for figures in of_arm]) for name in (SCORE, "accuracy")),
                shown_interval(paired(table, arm.name, FULL.name)) if arm.name != FULL.name else "",
                shown_spread([figures["upload_bytes"] / 1e3 for figures in of_arm if "upload_bytes" in figures], 0),
            ]
            yield table_row(cells)


def _titled(study: Study, epsilon: float) -> str:
    return "Without privacy" if isinf(epsilon) else f"Epsilon {epsilon:g}, delta {study.delta:g}"


def paired(table: Found, arm: str, other: str) -> list[float]:
    """Return the differences in macro F1 of two arms, in points, for each seed and epsilon that both have."""
    first, second = (
        {(job.epsilon, job.seed): 100 * table[job][SCORE] for job in sorted(table, key=_place) if job.arm == name}
        for name in (arm, other)
    )
    return differences(first, second)


def _place(job: Job) -> tuple[float, int]:
    return job.epsilon, job.seed


def _against_random(study: Study, table: Found) -> Iterator[str]:
    """Yield the claim and its control: whether choosing layers by attention helps, and more than a random choice."""
    yield "\n### The claim: layers chosen by attention lose less to noise than all layers\n"
    pairs = [("attention", FULL.name), ("random", FULL.name)]
    pairs += [("attention", other) for other in ("random", "last", "head")]
    yield from table_head(["epsilon", "seeds", *(f"{arm} less {other}" for arm, other in pairs)])
    for epsilon in sorted({job.epsilon for job in table}):
        of_epsilon = {job: figures for job, figures in table.items() if job.epsilon == epsilon}
        found = [paired(of_epsilon, *pair) for pair in pairs]
        cells = [f"{epsilon:g}", str(len(found[0])), *map(shown_interval, found)]
        yield table_row(cells)


def _rates(study: Study, found: Found) -> Iterator[str]:
    scores = {job: figures[SCORE] for job, figures in found.items()}
    chosen = choices(study, scores)
    yield "\n### Learning rates, by macro F1 on the validation part of seed 0 after half of the rounds\n"
    yield "| arm | epsilon | chosen | tried |"
    yield "|---|---|---|---|"
    for arm in study.arms:
        for epsilon in study.tuned:
            of_cell = tried(scores, (arm.name, epsilon))
            if of_cell:
                rate = chosen.get((arm.name, epsilon))
                shown = ", ".join(f"{each:g}: {100 * score:.1f}" for each, score in sorted(of_cell.items()))
                yield f"| {arm.name} | {epsilon:g} | {'not settled' if rate is None else f'{rate:g}'} | {shown} |"


# ---------------------------------------------------------------- plot


def picture(study: Study, found: Found, out: Path) -> None:
    """Draw macro F1 over epsilon, with t-intervals where there are several seeds."""
    # Without pyplot, which would look for a screen.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    table = {job: figures for job, figures in found.items() if not job.tunes}
    epsilons = sorted({job.epsilon for job in table})
    for number, (arm, colour) in enumerate(zip(study.arms, COLOURS, strict=False)):
        # Beside each other, so that no interval hides another.
        shift = 0.08 * (number - (len(ARMS) - 1) / 2)
        points = [
            (
                place + shift,
                [100 * table[job][SCORE] for job in table if (job.arm, job.epsilon) == (arm.name, epsilon)],
            )
            for place, epsilon in enumerate(epsilons)
        ]
        points = [(at, values) for at, values in points if values]
        means = [fmean(values) for _, values in points]
        reaches = [fmean(v) - interval(v)[0] if len(v) > 1 else 0.0 for _, v in points]
        axes.errorbar([at for at, _ in points], means, reaches, color=colour, marker="o", ms=4, lw=1, label=arm.name)
    if majority := [100 * figures["majority_f1"] for figures in table.values()]:
        axes.axhline(fmean(majority), color=FLAT, lw=0.8, ls=":", label="most frequent class")
    axes.set_xticks(range(len(epsilons)), ["no privacy" if isinf(each) else f"{each:g}" for each in epsilons])
    axes.set_xlabel(f"epsilon (delta {study.delta:g})")
    axes.set_ylabel("macro F1, unseen categories")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=110)
