"""A split as a picture: a bar for each site, with a piece for each class."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tessera.worker.data.partition.division import SiteCounts

MAX_NAMED = 20
"""Classes that have a colour and an entry in the legend of their own; of more, neighbours look alike."""

MAX_LABELLED = 50
"""Sites that make a picture taller; more share its height."""


def draw(tallies: Sequence[SiteCounts], title: str, out: Path) -> None:
    """Write a picture in the format that `out` ends in. Raises OSError, or ValueError for a format not known."""
    # Without pyplot, which would look for a screen.
    sites = min(len(tallies[0].counts), MAX_LABELLED)
    figure = Figure(figsize=(5.5 * len(tallies) + 1.5, 1.6 + 0.32 * sites), layout="constrained")
    for axes, tally in zip(figure.subplots(1, len(tallies), squeeze=False)[0], tallies, strict=True):
        _stack(axes, tally)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(out, dpi=130)


def _stack(axes: Axes, tally: SiteCounts) -> None:
    counts = np.array(tally.counts)  # [sites, names]
    few = len(tally.names) <= MAX_NAMED
    colours = mpl.colormaps["tab20" if few else "viridis"]
    shades = [colours(place if few else place / (len(tally.names) - 1)) for place in range(len(tally.names))]
    left = np.zeros(len(counts))
    for name, of_class, shade in zip(tally.names, counts.T, shades, strict=True):
        axes.barh(range(len(counts)), of_class, left=left, color=shade, label=name)
        left += of_class
    if len(counts) <= MAX_LABELLED:
        axes.set_yticks(range(len(counts)))
    axes.invert_yaxis()
    axes.set_ylabel("site")
    axes.set_xlabel("examples")
    axes.spines[["top", "right"]].set_visible(False)
    if few and len(tally.names) > 1:
        axes.legend(title=tally.what, fontsize="small", frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
