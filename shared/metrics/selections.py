"""Figures of a run's selections of layers: their turnover, and the overlap of the sites'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean

from tessera.shared.api.runs import Round
from tessera.shared.methods.layer_choice import LONE, OVERLAP, TURNOVER

Choices = Mapping[str, frozenset[str]]
"""The names of the layers that each site sent in a round, by site."""

SENT = "layers_sent"
"""The scalar of a version with the number of layers that the round changed, which all sites fetch."""

RECENT = 10
"""The rounds before a version in which a site's last selection is looked for."""
MOST_PAIRED = 200
"""The sites of a round, the first by name, whose overlap a version has."""


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


def _new_layers(last: Choices, now: Choices) -> list[int]:
    """Return the number of layers that each site chose and did not choose last, of the sites that chose before."""
    return [len(chosen - last[site]) for site, chosen in now.items() if site in last]


def jaccard(one: Collection[str], other: Collection[str]) -> float:
    """Return the number of layers in both over that in either, which must not be 0."""
    return len({*one} & {*other}) / len({*one} | {*other})
