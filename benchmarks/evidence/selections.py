"""Figures of a run's selections of layers: their turnover, and the overlap of the sites' beside that of chance.

They are computed from the outcomes of rounds, those of a simulation (`Result.outcomes`) or of a coordinator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, nan
from statistics import fmean

import numpy as np

from tessera.shared.client.round_outcomes import Outcome
from tessera.shared.model.blocks import Layer

Choices = Mapping[str, frozenset[str]]
"""The names of the layers that each site sent in a round, by site."""


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


def choices_of(outcomes: Iterable[Outcome]) -> list[Choices]:
    """Return the choices of each committed round. Rounds and updates without a layer are left out."""
    found: list[Choices] = []
    for outcome in outcomes:
        if outcome.round.state != "committed":
            continue
        choices: dict[str, frozenset[str]] = {}
        for task in outcome.round.tasks:
            if task.state == "merged" and task.layers:
                site = task.worker.partition("/")[0]
                choices[site] = choices.get(site, frozenset()) | {*task.layers}
        if choices:
            found.append(choices)
    return found


def selections(outcomes: Iterable[Outcome], layers: Sequence[Layer]) -> Selections:
    """Return the figures of a run among these layers, those of the model that can be chosen."""
    rounds = choices_of(outcomes)
    pairs = [pair for choices in rounds for pair in combinations(choices.values(), 2)]
    return Selections(
        turnover=_mean(_turnovers(rounds)),
        overlap=_mean(jaccard(*pair) for pair in pairs),
        chance=_mean(chance(*pair, layers) for pair in pairs),
        union=_mean(len(frozenset().union(*choices.values())) / len(layers) for choices in rounds),
    )


def _turnovers(rounds: Iterable[Choices]) -> Iterable[int]:
    last: dict[str, frozenset[str]] = {}
    for choices in rounds:
        yield from (len(chosen - last[site]) for site, chosen in choices.items() if site in last)
        last |= choices


def jaccard(one: Collection[str], other: Collection[str]) -> float:
    """Return the number of layers in both over that in either, which must not be 0."""
    return len({*one} & {*other}) / len({*one} | {*other})


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
