"""The tables: means over seeds with their standard deviation, and how many diverged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import inf, isfinite

import numpy as np

from linear_attention import theory
from linear_attention.curves import Curve, Point, Setting
from linear_attention.problem import RATES, draw
from linear_attention.study import KERNELS, Study

SHOWN = (0, 2, 5, 10, 20, 50, 100)
"""Lengths of warm-up that have a column; the nearest that was run is shown."""
RIVALS = (5, 15, 30, 60)
"""Fixed lengths that the rule is held against."""


def heading(text: str) -> str:
    return f"\n{text}\n{'-' * len(text)}"


def mean_and_std(values: Sequence[float], digits: int = 3) -> str:
    """Over those that are finite, with how many are not."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return "all diverged"
    lost = len(values) - len(finite)
    told = f"{np.mean(finite):.{digits}f} ±{np.std(finite):.{digits}f}"
    return f"{told} ({lost} diverged)" if lost else told


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A row may be short: its last cells are then empty."""
    lines = [columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for cells in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


# ---------------------------------------------------------------- to the digit


def exact(study: Study) -> Iterator[str]:
    yield heading("The frozen stage is an affine map in V, and simulated FedAvg is that map")
    rows = []
    for kernel in KERNELS:
        for steps in study.local_steps:
            worst = max(
                theory.affine_error(draw(kernel, delta, seed), RATES[kernel], steps)
                for delta in study.deltas
                for seed in range(study.seeds)
            )
            rows.append([kernel, str(steps), f"{worst:.1e}"])
    yield from table(["kernel", "local steps", "largest difference"], rows)
    alike = max(theory.drift_of_equal_inputs(0.5, seed, 0.05, 10) for seed in range(study.seeds))
    yield f"with the same inputs and other targets at each client, V_inf - V* is {alike:.1e} of V*"

    yield heading("Its drift: V_inf - V* against rate (E-1)/2 (mean A)^-1 mean(A_k grad F_k(V*)), E = 10")
    rows = []
    for kernel in KERNELS:
        for product in (0.01, 0.05, 0.1, 0.25, 0.5, 1.0):
            found = [
                theory.drift(draw(kernel, delta, seed), product / 10, 10)
                for delta in study.deltas
                if delta
                for seed in range(study.seeds)
            ]
            rows.append(
                [
                    kernel,
                    f"{product:g}",
                    f"{np.mean([one.length for one in found]):.2%}",
                    f"{np.mean([one.error for one in found]):.2%}",
                    f"{max(one.error for one in found):.2%}",
                    f"{min(one.cosine for one in found):.6f}",
                ]
            )
    yield from table(["kernel", "rate * E", "drift / |V*|", "mean error", "worst error", "worst cosine"], rows)


def descent(study: Study) -> Iterator[str]:
    yield heading("Warm-up as descent on the profile G: per run, rounds in which G rose, and |e| / |grad G|")
    rounds = min(study.rounds, 60)
    rows = []
    for kernel in KERNELS:
        for steps in study.local_steps:
            for delta in study.deltas:
                runs = [
                    theory.descents(draw(kernel, delta, seed), RATES[kernel], steps, rounds)
                    for seed in range(study.seeds)
                ]
                rows.append([kernel, str(steps), f"{delta:g}", *_descended(runs, rounds)])
    columns = ["kernel", "E", "delta", f"G after {rounds}", "rose, first 10", "rose, later", "bound broken"]
    yield from table([*columns, "|e|/|g| round 2", "round 6", f"round {rounds}"], rows)


def _descended(runs: Sequence[Sequence[theory.Descent]], rounds: int) -> list[str]:
    """The cells that these runs fill; all but the first are of those that did not diverge."""
    whole = [run for run in runs if len(run) == rounds]
    if not whole:
        return ["all diverged"]
    early = np.mean([sum(one.rose for one in run[:10]) for run in whole])
    late = np.mean([sum(one.rose for one in run[10:]) for run in whole])
    broken = sum(one.broke_its_bound for run in whole for one in run)
    ratios = [np.mean([run[at].ratio for run in whole]) for at in (1, 5, rounds - 1)]
    return [
        mean_and_std([run[-1].after if len(run) == rounds else inf for run in runs]),
        f"{early:.1f} of 10",
        f"{late:.1f} of {rounds - 10}",
        str(broken),
        *(f"{ratio:.2f}" for ratio in ratios),
    ]


# ---------------------------------------------------------------- curves


def by_setting(found: Sequence[Curve]) -> Iterator[tuple[Setting, list[list[Curve]]]]:
    """Settings in order, each with its curves by kernel and delta, over seeds."""

    def problem(curve: Curve) -> tuple[str, float]:
        return curve.kernel, curve.delta

    for setting in dict.fromkeys(curve.setting for curve in found):
        mine = sorted((curve for curve in found if curve.setting == setting), key=problem)
        yield setting, [list(curves) for _, curves in groupby(mine, problem)]


def title(setting: Setting) -> str:
    words = {
        "rounds": f"{setting.rounds} rounds",
        "steps": f"as many local steps ({setting.rounds} rounds)",
        "cohort": f"{setting.rounds} rounds of {setting.cohort} clients each",
    }
    return f"E = {setting.local_steps}, {words[setting.budget]}"


def excesses(found: Sequence[Curve]) -> Iterator[str]:
    for setting, problems in by_setting(found):
        yield heading(f"Excess objective at the end, by rounds of warm-up: {title(setting)}")
        rows = []
        for curves in problems:
            shown = [curves[0].at(length).length for length in SHOWN if length < setting.rounds]
            cells = [
                mean_and_std([curve.at(length).excess for curve in curves]) for length in (*shown, setting.rounds)
            ]
            best = ", ".join(str(curve.best.length) for curve in curves)
            rows.append([curves[0].kernel, f"{curves[0].delta:g}", *cells, best])
        yield from table(
            ["kernel", "delta", *map(str, shown), f"{setting.rounds} (never frozen)", "best by seed"], rows
        )


def parts(found: Sequence[Curve]) -> Iterator[str]:
    """Bias, drift and value over the warm-up's length."""
    named: list[tuple[str, Callable[[Point], float]]] = [
        ("bias", lambda point: point.bias),
        ("drift", lambda point: point.drift),
        ("value", lambda point: point.value),
    ]
    for setting, problems in by_setting(found):
        if setting.budget != "rounds":
            continue
        yield heading(f"What the excess is made of: {title(setting)}")
        rows = []
        for curves in problems:
            shown = [curves[0].at(length).length for length in SHOWN if length < setting.rounds]
            for name, part in named:
                cells = [mean_and_std([part(curve.at(n)) for curve in curves]) for n in (*shown, setting.rounds)]
                rows.append([curves[0].kernel, f"{curves[0].delta:g}", name, *cells])
        yield from table(["kernel", "delta", "part", *map(str, shown), str(setting.rounds)], rows)


def controls(found: Sequence[Curve]) -> Iterator[str]:
    for setting, problems in by_setting(found):
        if not setting.control_lengths:
            continue
        yield heading(f"Control, the value matrix frozen instead: {title(setting)}")
        rows = []
        for curves in problems:
            cells = []
            for index, length in enumerate(setting.control_lengths):
                cells.append(mean_and_std([curve.at(length).excess for curve in curves]))
                cells.append(mean_and_std([curve.control[index].excess for curve in curves]))
            never = mean_and_std([curve.never.excess for curve in curves])
            rows.append([curves[0].kernel, f"{curves[0].delta:g}", *cells, never])
        columns = [f"{what} from {n}" for n in setting.control_lengths for what in ("query/key", "value")]
        yield from table(["kernel", "delta", *columns, "never"], rows)


# ---------------------------------------------------------------- the rule


def regret(curve: Curve, point: Point) -> float:
    """How much of what the best length wins over no warm-up at all is lost with this one: 0 is best, 1 no gain."""
    won = curve.points[0].excess - curve.best.excess
    if not won:
        # Whatever trains everything diverges: no warm-up is best, and all else infinitely worse.
        return 0.0 if point.length == 0 else inf
    return (point.excess - curve.best.excess) / won


def rule(found: Sequence[Curve]) -> Iterator[str]:
    yield heading("Where the rule ends the warm-up: median length, and the regret in % of what the best length wins")
    arms: dict[str, Callable[[Curve], Point]] = {
        "auto": lambda curve: curve.auto,
        **{f"always {length}": _fixed(length) for length in RIVALS},
        "never": lambda curve: curve.never,
    }
    rows = []
    for setting, problems in by_setting(found):
        for kernel in KERNELS:
            curves = [c for group in problems for c in group if c.kernel == kernel and isfinite(c.best.excess)]
            if not curves:
                continue
            ends, best = ([point.length for point in points] for points in _auto_and_best(curves))
            regrets = [[regret(curve, point(curve)) for curve in curves] for point in arms.values()]
            rows.append(
                [title(setting), kernel, f"{np.median(ends):.0f}", f"{np.median(best):.0f}", *map(_percent, regrets)]
            )
    yield from table(["setting", "kernel", "auto ends", "best", *arms], rows)
    yield from _against_never(found)


def _against_never(found: Sequence[Curve]) -> Iterator[str]:
    yield heading(
        "The excess in units of the best length's: median over problems and seeds where that is not nothing"
    )
    rows = []
    for setting, problems in by_setting(found):
        for kernel in KERNELS:
            curves = [c for group in problems for c in group if c.kernel == kernel and _left_over(c)]
            if not curves:
                continue
            auto, never = (
                [point.excess / curve.best.excess for point, curve in zip(points, curves, strict=True)]
                for points in ([c.auto for c in curves], [c.never for c in curves])
            )
            less = sum(one < other for one, other in zip(auto, never, strict=True))
            diverged = [str(sum(not isfinite(one) for one in arm)) for arm in (auto, never)]
            medians = [f"{np.median(arm):.2f}" for arm in (auto, never)]
            rows.append([title(setting), kernel, *medians, f"{less} of {len(curves)}", *diverged])
    columns = ["setting", "kernel", "auto", "never", "auto below never", "auto diverged", "never diverged"]
    yield from table(columns, rows)


def _left_over(curve: Curve) -> bool:
    """Whether even the best length leaves more than a hundredth of what there is without any warm-up."""
    return curve.best.excess > 0.01 * curve.points[0].excess


def _fixed(length: int) -> Callable[[Curve], Point]:
    return lambda curve: curve.at(length)


def _auto_and_best(curves: Sequence[Curve]) -> tuple[list[Point], list[Point]]:
    return [curve.auto for curve in curves], [curve.best for curve in curves]


def _percent(regrets: Sequence[float]) -> str:
    finite = [100 * value for value in regrets if isfinite(value)]
    if not finite:
        return "all diverged"
    lost = len(regrets) - len(finite)
    told = f"{np.mean(finite):.1f}, worst {max(finite):.1f}"
    return f"{told} ({lost} diverged)" if lost else told
