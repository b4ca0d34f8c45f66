"""The tables and the plot of the convex study, from the figures of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.document import table_head, table_row
from evidence.convex.study import ARMS, CONTROL_ARM, LEVELS
from evidence.statistics import shown_interval
from tessera.simulation.comparison.statistics import CONFIDENCE

LARGE = 1e4
"""A distance, in %, from which on a run counts as diverged."""
DRAWN = ("fedavg", "fednova", "scaffold weigh=examples", "feddyn", "feddyn alpha=1.0 weigh=examples")
COLOURS = ("#000000", "#ef6c00", "#1565c0", "#b71c1c", "#2e7d32")
PANELS = ("all", "drawn", "by time")

Found = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""The figures of runs, by arm, scenario and seed."""


def lines(found: Found, limits: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    names = list(dict.fromkeys(scenario for _, scenario, _ in found))
    seeds = sorted({seed for _, _, seed in found})
    yield (
        f"{len(found)} runs, seeds {', '.join(map(str, seeds))}. Distances from the minimum in % of its length after "
        f"{max(figures['rounds'][-1] for figures in found.values())} rounds: mean ± standard deviation over seeds."
    )
    yield "\n### Distance from the minimum\n"
    yield from _table(found, names, _distance)
    yield f"\n### Less that of FedAvg, paired by seed, in points, with {CONFIDENCE:.0%} t-intervals\n"
    yield from _table(found, names, lambda runs: _paired(found, runs), but=CONTROL_ARM.name)
    for level in LEVELS:
        yield f"\n### Rounds, and seconds by the study's clock, until the distance stays below {level:g} %\n"
        yield from _table(found, names, lambda runs, level=level: _reached(runs, level))
    yield "\n### The same runs by the papers' equations, in numpy\n"
    yield from _table(found, names, _papers)
    yield from _invariants(found)
    yield from _limits(limits)


def _table(found: Found, names: Sequence[str], shown: Any, but: str = "") -> Iterator[str]:
    yield from table_head(["method", *names])
    for arm in ARMS:
        of_arm = [
            {key: figures for key, figures in found.items() if key[:2] == (arm.name, scenario)} for scenario in names
        ]
        if any(of_arm) and arm.name != but:
            yield table_row([arm.name, *(shown(runs) if runs else "-" for runs in of_arm)])


def digits(value: float) -> str:
    """Return a number with two significant digits, and no exponent."""
    if abs(value) >= 10:
        return f"{value:.0f}"
    return (
        f"{value:.1f}"
        if abs(value) >= 1
        else (f"{value:.6f}".rstrip("0").rstrip(".") if value == 0 else _small(value))
    )


def _small(value: float) -> str:
    return f"{float(f'{value:.1e}'):.7f}".rstrip("0").rstrip(".")


def _spread(values: Sequence[float]) -> str:
    if max(values) >= LARGE:
        return "diverged" if min(values) >= LARGE else f"{sum(v >= LARGE for v in values)} of {len(values)} diverged"
    spread = f" ± {digits(stdev(values))}" if len(values) > 1 else ""
    return f"{digits(fmean(values))}{spread}"


def _distance(runs: Found) -> str:
    return _spread([figures["distances"][-1] for figures in runs.values()])


def _papers(runs: Found) -> str:
    known = [figures["paper"] for figures in runs.values() if figures["paper"] is not None]
    return _spread(known) if known else "-"


def paired(found: Found, runs: Found) -> list[float]:
    """Return the differences of final distances to FedAvg's in the same scenario, for each seed that both have."""
    both = [(figures, found.get((CONTROL_ARM.name, scenario, seed))) for (_, scenario, seed), figures in runs.items()]
    return [own["distances"][-1] - control["distances"][-1] for own, control in both if control is not None]


def _paired(found: Found, runs: Found) -> str:
    values = paired(found, runs)
    return "diverges" if max(values, default=0.0) >= LARGE / 10 else shown_interval(values)


def _reached(runs: Found, level: float) -> str:
    found = [figures["reached"][f"{level:g}"] for figures in runs.values()]
    known = [each for each in found if each]
    if not known:
        return "never"
    if len(known) < len(found):
        return f"{len(known)} of {len(found)} seeds"
    return f"{fmean(number for number, _ in known):.0f}, {fmean(seconds for _, seconds in known):.0f} s"


def _invariants(found: Found) -> Iterator[str]:
    largest: dict[str, float] = {}
    for (arm, _, _), figures in found.items():
        if figures["invariant"] is not None and figures["distances"][-1] < LARGE:
            largest[arm] = max(largest.get(arm, 0.0), figures["invariant"])
    if not largest:
        return
    abandoned = sum(figures["abandoned"] for figures in found.values())
    yield (
        f"\nIn these runs {abandoned} attempts were abandoned. The largest difference between the server's mean of "
        "what sites keep and the mean of their vaults: "
        + ", ".join(f"{arm} {value:.0e}" for arm, value in largest.items())
        + "."
    )


def _limits(limits: Mapping[str, Any]) -> Iterator[str]:
    """Yield the distances at which the equations of FedAvg and FedNova stay, by the learning rate."""
    if not limits:
        return
    rates = list(next(iter(limits.values())))
    yield "\n### Where the equations stay, in %, by the learning rate as a share of the study's: by time, all sites\n"
    yield from table_head(["method", *rates])
    for name, of_rate in limits.items():
        yield table_row([name, *(_spread(of_rate[rate]) for rate in rates)])


# ---------------------------------------------------------------- plot


def picture(found: Found, out: Path) -> None:
    """Draw the distance by round, and by the clock's seconds, as geometric means over seeds."""
    # Without pyplot, which would look for a screen.
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, len(PANELS), sharey=True)
    for column, scenario in enumerate(PANELS):
        for row, by in enumerate(("rounds", "seconds")):
            _panel(axes[row][column], found, scenario, by)
        axes[0][column].set_title(scenario, fontsize=9)
        axes[0][column].set_xlabel("rounds", fontsize=8)
        axes[1][column].set_xlabel("seconds by the study's clock", fontsize=8)
    for row in range(2):
        axes[row][0].set_ylabel("distance from the minimum, %", fontsize=8)
    if axes[0][0].lines:
        axes[0][0].legend(frameon=False, fontsize=7)
    figure.savefig(out, dpi=90)


def _panel(axes: Axes, found: Found, scenario: str, by: str) -> None:
    for name, colour in zip(DRAWN, COLOURS, strict=True):
        runs = [figures for (arm, where, _), figures in found.items() if (arm, where) == (name, scenario)]
        if runs:
            means = [_geometric(each) for each in zip(*(figures["distances"] for figures in runs), strict=True)]
            places = [fmean(each) for each in zip(*(figures[by] for figures in runs), strict=True)]
            axes.plot(places, means, color=colour, marker="o", ms=2, lw=1, label=name)
    axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)


def _geometric(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product
