"""Figures of a whole run's selections of layers, beside the overlap of random ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, nan
from statistics import fmean

import numpy as np

from tessera.shared.api.runs import Round
from tessera.shared.metrics.selections import Choices, choices_of, jaccard
from tessera.shared.model.blocks import Layer


@dataclass(frozen=True)
class Selections:
    """Means over rounds, and nan where no round has the figure."""

    turnover: float
    """The number of layers that a site sent and did not send the last time."""
    overlap: float
    """The Jaccard index of two sites' layers in one round: those that both sent over those that either sent."""
    chance: float
    """The expected overlap of random layers, of the same number in each stack."""
    union: float
    """The share of the layers that a round changed, which is the share that all sites fetch."""


def selections(rounds: Iterable[Round], layers: Sequence[Layer]) -> Selections:
    """Return the figures of a run. `layers` are the layers of the model that can be chosen."""
    chosen = choices_of(rounds)
    pairs = [pair for each in chosen for pair in combinations(each.values(), 2)]
    return Selections(
        turnover=_mean(_turnovers(chosen)),
        overlap=_mean(jaccard(*pair) for pair in pairs),
        chance=_mean(chance(*pair, layers) for pair in pairs),
        union=_mean(len(frozenset().union(*each.values())) / len(layers) for each in chosen),
    )


def _turnovers(rounds: Iterable[Choices]) -> Iterable[int]:
    last: dict[str, frozenset[str]] = {}
    for each in rounds:
        yield from (len(chosen - last[site]) for site, chosen in each.items() if site in last)
        last |= each


def chance(one: Collection[str], other: Collection[str], layers: Sequence[Layer]) -> float:
    """Return the expected Jaccard index of two independent choices of as many layers in each stack as these."""
    common = np.ones(1)  # [layers in common], their probabilities
    for stack in dict.fromkeys(layer.stack for layer in layers):
        names = {layer.name for layer in layers if layer.stack == stack}
        total, drawn, marked = len(names), len(names & {*one}), len(names & {*other})
        ways = [comb(marked, i) * comb(total - marked, drawn - i) for i in range(min(drawn, marked) + 1)]
        common = np.convolve(common, np.array(ways) / comb(total, drawn))
    size = len(one) + len(other)
    return float(sum(share * i / (size - i) for i, share in enumerate(common)))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else nan
