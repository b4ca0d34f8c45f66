"""Figures of a run's selections of layers: their turnover, and the overlap of the sites' beside that of chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, nan
from statistics import fmean

import numpy as np

from tessera.shared.api.runs import Round
from tessera.shared.methods.layer_choice import LONE, OVERLAP, TURNOVER
from tessera.shared.model.blocks import Layer

Choices = Mapping[str, frozenset[str]]
"""The names of the layers that each site sent in a round, by site."""

SENT = "layers_sent"
"""The scalar of a version with the number of layers that the round changed, which all sites fetch."""

RECENT = 10
"""The rounds before a version in which a site's last selection is looked for."""
MOST_PAIRED = 200
"""The sites of a round, the first by name, whose overlap a version has."""


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


def choices(sent: Iterable[tuple[str, Collection[str]]]) -> Choices:
    """Return the choices of the sites of a round, of each update's site and layers. An update without a layer is left
    out."""
    found: dict[str, frozenset[str]] = {}
    for site, layers in sent:
        if layers:
            found[site] = found.get(site, frozenset()) | {*layers}
    return found


def choices_of(rounds: Iterable[Round]) -> list[Choices]:
    """Return the choices of each committed round. Rounds without a layer are left out."""
    committed = [made.tasks for made in rounds if made.state == "committed"]
    merged = ([(task.worker, task.layers) for task in tasks if task.state == "merged"] for tasks in committed)
    found = [choices((worker.partition("/")[0], layers) for worker, layers in sent) for sent in merged]
    return [each for each in found if each]


def selection_scalars(earlier: Sequence[Choices], now: Choices) -> dict[str, float]:
    """Return the figures of a round's choices, as far as it has them, by their names as scalars. `earlier` are the
    choices of the `RECENT` versions before."""
    if not now:
        return {}
    senders = Counter(layer for chosen in now.values() for layer in chosen)
    found = {SENT: float(len(senders))}
    last: dict[str, frozenset[str]] = {}
    for each in earlier:
        last |= each
    if again := _new_layers(last, now):
        found[TURNOVER] = fmean(again)
    if len(now) > 1:
        # The number of pairs grows with the square of the sites'.
        found[OVERLAP] = fmean(jaccard(*pair) for pair in combinations([*now.values()][:MOST_PAIRED], 2))
        found[LONE] = fmean(count == 1 for count in senders.values())
    return found


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
        yield from _new_layers(last, each)
        last |= each


def _new_layers(last: Choices, now: Choices) -> list[int]:
    """Return the number of layers that each site chose and did not choose last, of the sites that chose before."""
    return [len(chosen - last[site]) for site, chosen in now.items() if site in last]


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
