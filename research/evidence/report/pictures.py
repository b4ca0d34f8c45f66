"""Plots of the tables: curves over rounds, and final scores over the bytes of uploads."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from matplotlib import colormaps
from matplotlib.figure import Figure

from evidence.plan import Plan
from evidence.report.lines import heading
from evidence.report.rows import Found, Row, row


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
        # Sites with models of their own are tested on other examples than the table's.
        if each.part == table.part and each.curves(each.part):
            yield each


def picture(plan: Plan, found: Found, name: str, out: Path) -> None:
    """Draw the curves of a table's rows, with bands of a standard error, and their final scores over uploads.

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
        finals, moved = [*each.final(each.part).values()], each.megabytes("upload")
        if finals and moved and fmean(moved) > 0:
            error = stdev(finals) / sqrt(len(finals)) if len(finals) > 1 else 0.0
            right.errorbar(fmean(moved), fmean(finals), error, color=colour, marker="o", ms=4)
            right.annotate(
                each.arm.name, (fmean(moved), fmean(finals)), fontsize=7, xytext=(4, 2), textcoords="offset points"
            )
    left.set_xlabel("round")
    left.set_ylabel(heading(table.part, table))
    left.legend(frameon=False, fontsize=7, ncols=2)
    right.set_xscale("log")
    right.set_xlabel("MB sent by all sites in all rounds")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=100)
