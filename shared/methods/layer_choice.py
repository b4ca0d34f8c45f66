"""The choice of some of a model's layers in a round: by scores, by votes, by draws, and by a calendar.

Layers of several stacks (encoder and decoder, two towers) are chosen within their stack, of which each contributes
its share. Pure functions: the same scores, votes, round and draws give the same layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from math import ceil
from random import Random
from statistics import fmean
from typing import Literal, Self

from tessera.shared.methods.base import UnsupportedRun, Update
from tessera.shared.model.blocks import Block, Layer, Role, layer_labels, layers_of
from tessera.shared.model.selectors import EVERYTHING, Match, Selector

# The scalars of a version whose sites chose layers (`shared.metrics.selections`).
TURNOVER = "turnover"
"""Of the layers that a site sent, the number that it did not send the last time: the mean over the sites."""
OVERLAP = "overlap"
"""The Jaccard index of two sites' layers, the mean over all pairs."""
LONE = "one_sender"
"""The share of the layers sent that a single site sent, of several."""


@dataclass(frozen=True)
class ChosenLayers:
    """The layers that were chosen last. Another one takes a place if its score is larger by the margin."""

    names: frozenset[str] = frozenset()
    margin: float = 0.0
    """As a share of the score of the layer that would lose its place."""

    def factor(self, name: str) -> float:
        """Return the factor of a layer's score, at most 1: that of layers which hold a place."""
        return 1.0 if name in self.names else 1 / (1 + self.margin)

    def rank(self, name: str, scores: Mapping[str, float]) -> tuple[float, bool]:
        """Return the key by which layers are sorted, best first."""
        return -scores[name] * self.factor(name), name not in self.names


NOTHING_HELD = ChosenLayers()


@dataclass(frozen=True)
class Candidates:
    """The layers of each stack that can be chosen, with the blocks that the settings train."""

    stacks: tuple[tuple[Layer, ...], ...]
    within: tuple[Role, ...] | None
    """The roles that train in a chosen layer; all if None."""
    always: tuple[Block, ...]
    """The blocks that train regardless of the choice."""

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        *,
        attention: bool = True,
        within: tuple[Role, ...] | None = None,
        always: Collection[Role] = (),
        trainable: Selector = EVERYTHING,
    ) -> Self:
        """Return the layers of a block table with some `trainable` blocks of the roles `within`, with `attention`
        only those that have a query, and the trainable blocks outside layers with the roles `always`."""
        stacks: dict[str, list[Layer]] = {}
        for layer in layers_of(blocks):
            if attention and not any(block.role == "query" for block in layer.blocks):
                continue
            # An adapter is treated like its matrix.
            of_roles = (
                block for block in layer.blocks if not within or {block.role, *block.adapts}.intersection(within)
            )
            if trained := tuple(filter(trainable.holds, of_roles)):
                stacks.setdefault(layer.stack, []).append(replace(layer, blocks=trained))
        named = (block for block in blocks if block.layer is None and block.role in always)
        outside = tuple(filter(trainable.holds, named))
        return cls(tuple(map(tuple, stacks.values())), within, outside)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for stack in self.stacks for layer in stack)

    @property
    def labels(self) -> dict[str, str]:
        """The suffix of each layer's scalars, by its name."""
        return layer_labels(self.layers)

    def quotas(self, count: int) -> list[int]:
        """Return each stack's share of `count` layers, in proportion: the ranks of all stacks, sorted by midpoint."""
        ranks = [((rank + 0.5) / len(stack), s) for s, stack in enumerate(self.stacks) for rank in range(len(stack))]
        chosen = [s for _, s in sorted(ranks)[:count]]
        return [chosen.count(s) for s in range(len(self.stacks))]

    def shares(self, count: int) -> list[tuple[tuple[Layer, ...], int]]:
        """Return each stack with its share of `count` layers."""
        return list(zip(self.stacks, self.quotas(count), strict=True))

    def top(
        self, scores: Mapping[str, float], count: int, drawn: Sequence[str] = (), held: ChosenLayers = NOTHING_HELD
    ) -> list[Layer]:
        """Return `count` layers: those drawn, by name, in their order, and then those of the largest scores.

        Of equals, layers that hold a place come first, and then those nearer the input.
        """
        chosen: list[Layer] = []
        for stack, quota in self.shares(count):
            own = {layer.name: layer for layer in stack}
            first = [own[name] for name in drawn if name in own][:quota]
            others = [layer for layer in stack if layer not in first]
            others.sort(key=lambda layer: held.rank(layer.name, scores))
            chosen += [*first, *others[: quota - len(first)]]
        return chosen

    def trained_bytes(self, count: int) -> int:
        """Return the most bytes that any choice of `count` layers trains, and sends."""
        total = sum(block.nbytes for block in self.always)
        for stack, quota in self.shares(count):
            total += sum(sorted((layer.nbytes for layer in stack), reverse=True)[:quota])
        return total

    def fitting(self, nbytes: float) -> int:
        """Return the largest number of layers for which any choice trains at most `nbytes`."""
        return max((k for k in range(len(self.layers) + 1) if self.trained_bytes(k) <= nbytes), default=0)

    def selector(self, chosen: Sequence[Layer]) -> Selector:
        """Select the trained blocks of the chosen layers, and the blocks that always train."""
        patterns = tuple(pattern for layer in chosen for pattern in _patterns(layer))
        always = tuple(escape(block.name) for block in self.always)
        matches = [Match(roles=self.within, names=patterns)] if patterns else []
        if self.within and any(block.adapts for layer in chosen for block in layer.blocks):
            matches.append(Match(adapts=self.within, names=patterns))
        return Selector(include=(*matches, Match(names=always)) if always else tuple(matches))


def _patterns(layer: Layer) -> Sequence[str]:
    # A layer of a custom block map has no common prefix.
    return [f"{escape(layer.name)}.*"] if layer.stack else [escape(block.name) for block in layer.blocks]


# ---------------------------------------------------------------- one choice for all sites


@dataclass(frozen=True)
class CommonChoice:
    """The coordinator's choice for all sites, by the mean of their scores or votes, with its memory in the version's
    scalars."""

    candidates: Candidates
    reported: Literal["score", "vote"]
    """The prefix of the metrics that sites report, and of their means in the scalars."""
    by_examples: bool
    """True if a site's report counts by its examples; the votes of the largest site then as the second largest's."""
    smoothing: float
    hysteresis: float

    def layers(self, scalars: Mapping[str, float], count: int, drawn: Sequence[str] = ()) -> list[Layer] | None:
        """Return the layers of the next round, those drawn first; None before the first reports."""
        labels = self.candidates.labels
        means = {n: scalars[at] for n, label in labels.items() if (at := f"{self.reported}.{label}") in scalars}
        if len(means) < len(labels):
            return None
        held = frozenset(name for name, label in labels.items() if self.hysteresis and scalars.get(f"held.{label}"))
        return self.candidates.top(means, count, drawn, ChosenLayers(held, self.hysteresis))

    def after(self, scalars: Mapping[str, float], updates: Sequence[Update], count: int) -> dict[str, float]:
        """Return the scalars that the reports of a round change. A site without a report has no part in them."""
        labels, found = self.candidates.labels, dict[str, float]()
        for name in (f"{self.reported}.{label}" for label in labels.values()):
            senders = [update for update in updates if name in update.metrics]
            if not senders:
                continue
            weights = self._weights([update.examples for update in senders])
            found[name] = fmean([update.metrics[name] for update in senders], weights)
            if name in scalars:
                found[name] = self.smoothing * scalars[name] + (1 - self.smoothing) * found[name]
        if self.hysteresis and (chosen := self.layers({**scalars, **found}, count)) is not None:
            names = {layer.name for layer in chosen}
            found |= {f"held.{label}": float(name in names) for name, label in labels.items()}
        return found

    def _weights(self, examples: Sequence[int]) -> Sequence[float]:
        if self.reported == "vote":
            return vote_weights(examples, by_examples=self.by_examples)
        return examples


# ---------------------------------------------------------------- layers that no score chooses


def due(candidates: Candidates, count: int, every: int, number: int) -> list[str]:
    """Return the layers that round `number` trains regardless of scores, by name: each one in one round of `every`,
    and at most `count` of them. Another one is first in each cycle, for workers that train fewer.

    It depends on the round alone, so no absence and no repetition of a round can make a layer wait for longer.
    """
    names: list[str] = []
    for stack, quota in candidates.shares(count):
        late = stack[number % every :: every]
        turn = number // every % max(1, len(late))
        names += [layer.name for layer in (*late[turn:], *late[:turn])[:quota]]
    return names


def check_calendar(candidates: Candidates, every: int, count: int, setting: str = "pick_every") -> None:
    """Raise UnsupportedRun if `every` rounds of `count` layers cannot train each layer. `setting` names `every`."""
    for stack, quota in candidates.shares(count):
        if ceil(len(stack) / every) > quota:
            remedy = (
                f"raise {setting} to {ceil(len(stack) / quota)}, or" if quota else "of this stack none is chosen:"
            )
            raise UnsupportedRun(
                f"{setting} is {every}, and {quota} of the {len(stack)} layers from {stack[0].name} on train in a "
                f"round: {remedy} raise the number of layers"
            )


def waiting(candidates: Candidates, count: int, last: Mapping[str, int], before: int) -> list[str]:
    """Return the layers whose last update, in round `last[name]` (0 if none), was in round `before` or earlier, by
    name: at most `count` of them, first the layer that waits longest, of equals the layer nearer the input."""
    names: list[str] = []
    for stack, quota in candidates.shares(count):
        late = [layer.name for layer in stack if last[layer.name] <= before]
        names += sorted(late, key=last.__getitem__)[:quota]
    return names


def explored(candidates: Candidates, count: int, share: float, taken: Sequence[str], rng: Random) -> list[str]:
    """Return the layers drawn for the places that `taken` leaves free, by name: each place is drawn with the
    probability `share`, and then by any layer that is not taken."""
    drawn: list[str] = []
    for stack, quota in candidates.shares(count):
        free = [layer.name for layer in stack if layer.name not in taken]
        places = quota - (len(stack) - len(free))
        drawn += rng.sample(free, sum(rng.random() < share for _ in range(places)))
    return drawn


# ---------------------------------------------------------------- votes


def check_ballot(candidates: Candidates, votes: Mapping[str, float], count: int) -> None:
    """Raise ValueError unless a ballot, by layer name, has one vote for each of `count` layers of its stacks."""
    for stack, quota in candidates.shares(count):
        given = [votes.get(layer.name) for layer in stack]
        wrong = [(layer, vote) for layer, vote in zip(stack, given, strict=True) if vote not in (0.0, 1.0)]
        if wrong:
            raise ValueError(f"the vote for {wrong[0][0].name} is {wrong[0][1]}, and must be 0 or 1")
        if (cast := given.count(1.0)) != quota:
            raise ValueError(f"the ballot has {cast} votes for layers from {stack[0].name} on, and must have {quota}")


def vote_weights(examples: Sequence[int], *, by_examples: bool) -> list[float]:
    """Return the weight of each site's ballot: 1, or its examples, but at most those of the second largest site.

    So with three sites or more, none outweighs the others together, however many examples it declares.
    """
    if not by_examples:
        return [1.0] * len(examples)
    most = sorted(examples)[-2:][0] if examples else 0
    return [float(min(number, most)) for number in examples]
