"""The curves in one picture: a row for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from linear_attention.curves import Curve, Point, Setting, lengths
from linear_attention.study import KERNELS

COLOURS = ("#2e7d32", "#1565c0", "#ef6c00", "#b71c1c", "#6a1b9a")


def picture(found: Sequence[Curve], out: Path) -> None:
    """Profile descent, the parts of the excess, and the excess over the warm-up's length by delta and by E."""
    # Without pyplot, which would look for a screen.
    figure = Figure(figsize=(17, 8), layout="constrained")
    settings = [setting for setting in dict.fromkeys(curve.setting for curve in found) if setting.budget == "rounds"]
    deltas = sorted({curve.delta for curve in found})
    most, middle, high = settings[-1], settings[len(settings) // 2], deltas[-2] if len(deltas) > 2 else deltas[-1]
    for row, kernel in zip(figure.subplots(len(KERNELS), 4), KERNELS, strict=True):
        mine = [curve for curve in found if curve.kernel == kernel]
        _descent(row[0], [curve for curve in mine if curve.setting == most], deltas, f"{kernel}, {_steps(most)}")
        _parts(
            row[1], [c for c in mine if c.setting == middle and c.delta == high], f"{_steps(middle)}, delta {high:g}"
        )
        for colour, delta in zip(COLOURS, deltas, strict=False):
            curves = [curve for curve in mine if curve.setting == most and curve.delta == delta]
            _excess(row[2], curves, colour, f"delta {delta:g}", f"excess, {_steps(most)}")
        for colour, setting in zip(COLOURS, settings, strict=False):
            curves = [curve for curve in mine if curve.setting == setting and curve.delta == high]
            _excess(row[3], curves, colour, _steps(setting), f"excess, delta {high:g}")
        for axes in row:
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xlim(left=0)
            axes.set_xlabel("rounds of warm-up")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=110)


def _steps(setting: Setting) -> str:
    return f"E = {setting.local_steps}"


def _descent(axes: Axes, curves: Sequence[Curve], deltas: Sequence[float], title: str) -> None:
    for colour, delta in zip(COLOURS, deltas, strict=False):
        for index, curve in enumerate(curve for curve in curves if curve.delta == delta):
            over = np.array(curve.profile) - curve.least
            at = lengths(curve.setting.rounds)[: len(over)]
            axes.plot(at, over, color=colour, lw=1, label=None if index else f"delta {delta:g}")
    axes.set_yscale("log")
    axes.set_title(f"profile G - G*: {title}", loc="left", fontsize=10)


def _parts(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    parts: list[tuple[str, str, Callable[[Point], float]]] = [
        ("excess", "#000000", lambda point: point.excess),
        ("bias", "#1565c0", lambda point: point.bias),
        ("drift", "#b71c1c", lambda point: point.drift),
        ("value", "#777777", lambda point: point.value),
    ]
    for name, colour, part in parts:
        _line(axes, curves, part, colour, name)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.axhline(0, color="#cccccc", lw=0.8, zorder=0)
    axes.set_title(f"excess = bias + drift + value: {title}", loc="left", fontsize=10)


def _excess(axes: Axes, curves: Sequence[Curve], colour: str, label: str, title: str) -> None:
    _line(axes, curves, lambda point: point.excess, colour, label)
    for index, curve in enumerate(curves):
        if curve.auto.excess < inf:
            said = "where the rule ends" if index == 0 and colour == COLOURS[0] else None
            axes.plot(curve.auto.length, curve.auto.excess, "v", ms=6, mec="black", mfc=colour, label=said)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10)


def _line(axes: Axes, curves: Sequence[Curve], part: Callable[[Point], float], colour: str, label: str) -> None:
    """The mean over the seeds that did not diverge, and the range of these."""
    values = np.array([[part(point) for point in curve.points] for curve in curves])
    values[~np.isfinite(values)] = np.nan
    told = ~np.isnan(values).all(axis=0)
    at = np.array([point.length for point in curves[0].points])[told]
    shown = values[:, told]
    axes.plot(at, np.nanmean(shown, axis=0), color=colour, label=label)
    axes.fill_between(at, np.nanmin(shown, axis=0), np.nanmax(shown, axis=0), color=colour, alpha=0.12, lw=0)
