"""A chart of the run: scores and bytes by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tessera.examples.ledger import Entry, stages

SHADES = ("#fff3e0", "#e3f2fd", "#f1f8e9")


def draw(entries: Sequence[Entry], out: Path) -> None:
    """Write a PNG: accuracy and macro F1 above, bytes compared with a full exchange below."""
    # Without pyplot, which would look for a screen.
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    scores, traffic = figure.subplots(2, 1, sharex=True)
    numbers = [entry.number for entry in entries]
    _draw_scores(scores, numbers, entries)
    _draw_traffic(traffic, numbers, entries)
    for axes in (scores, traffic):
        axes.spines[["top", "right"]].set_visible(False)
        for shade, members in zip(SHADES, stages(entries).values(), strict=False):
            axes.axvspan(members[0].number - 0.5, members[-1].number + 0.5, color=shade, zorder=0)
    for name, members in stages(entries).items():
        scores.text(members[0].number - 0.3, 0.98, name, va="top", color="#555555")
    scores.set_title("Four sites, one global model", loc="left")
    traffic.set_xlabel("round")
    traffic.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    figure.savefig(out, dpi=130)


def _draw_scores(axes: Axes, numbers: list[int], entries: Sequence[Entry]) -> None:
    for name, label, colour in (("accuracy", "accuracy", "#1565c0"), ("macro_f1", "macro F1", "#ef6c00")):
        axes.plot(
            numbers,
            [entry.scores.get(name, float("nan")) for entry in entries],
            "o-",
            ms=3,
            label=label,
            color=colour,
        )
    axes.set_ylim(0, 1)
    axes.set_ylabel("on the laboratory's images")
    axes.legend(loc="lower right", frameon=False)


def _draw_traffic(axes: Axes, numbers: list[int], entries: Sequence[Entry]) -> None:
    down = [entry.download_bytes / 1e6 for entry in entries]
    up = [entry.upload_bytes / 1e6 for entry in entries]
    full = [entry.full_bytes / 1e6 for entry in entries]
    axes.bar(numbers, down, label="down to the sites", color="#26a69a")
    axes.bar(numbers, up, bottom=down, label="up from the sites", color="#7e57c2")
    axes.step(numbers, full, where="mid", ls="--", lw=1, color="#555555", label="whole model, both ways")
    axes.set_ylabel("MB in the round, all sites")
    axes.legend(loc="center right", frameon=False)
