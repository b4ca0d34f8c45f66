"""Counts of predictions for labels that are not one class for each example. They add up over batches and ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.shared.api.class_counts import (
    MAX_LABELS,
    SCORE_BINS,
    SCORE_EDGES,
    EntityCounts,
    LabelCounts,
    LabelScores,
    NumberSums,
)
from tessera.worker.training.ranks import Ranks

Range = tuple[float, float]
"""The least and the largest value of an example."""


class ExampleFigures:
    """Sums of the examples' values, which add up over batches and over ranks. A value outside of its range counts as
    the nearest in it, and one that is not a number as the least, as does an example without a value."""

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        """`ranges` are those of a value of each figure, by its name."""
        self.ranges = dict(ranges)
        self._sums = torch.zeros(len(self.ranges), dtype=torch.float64)
        """Of the values, less the least one for each example."""

    def add(self, name: str, values: Tensor) -> None:
        """Add the values of some examples, [examples], to a figure."""
        low, high = self.ranges[name]
        found = values.detach().cpu().double().nan_to_num(nan=low, posinf=high, neginf=low).clamp(low, high) - low
        self._sums[list(self.ranges).index(name)] += found.sum()

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        if self.ranges:
            self._sums = ranks.total(self._sums)

    def sums(self) -> dict[str, Tensor]:
        """Return the sums by name."""
        return dict(zip(self.ranges, self._sums, strict=True))

    def means(self, examples: int, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean over these examples of each figure, by its sum."""
        return {
            name: low + min(high - low, max(0.0, float(sums[name]) / examples))
            for name, (low, high) in self.ranges.items()
        }


class LabelTally:
    """Counts of examples that have several labels each, by group of examples."""

    def __init__(self, groups: int, labels: int) -> None:
        self._scores = torch.zeros(groups, labels, 2, SCORE_BINS, dtype=torch.int64)
        """[group, label, is without the label, bin of the label's probability]."""

    def add(self, logits: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Count examples by their logits and labels, [examples, labels], and the place of each one's group."""
        probabilities, true = logits.float().sigmoid().cpu().double(), labels.cpu() > 0.5
        bins = torch.bucketize(probabilities, torch.tensor(SCORE_EDGES, dtype=torch.float64), right=True)
        at = (groups[:, None].expand_as(bins), torch.arange(bins.shape[1]).expand_as(bins), (~true).long(), bins)
        self._scores.index_put_(at, torch.tensor(1), accumulate=True)

    def sum_over(self, ranks: Ranks) -> None:
        """Add the counts of all ranks."""
        self._scores = ranks.total(self._scores)

    def total(self, ignored: tuple[int, ...] = ()) -> LabelCounts:
        """Return the counts of all groups; macro F1 leaves out the labels at the places `ignored`."""
        found = self.whole()
        return LabelCounts.model_construct(
            examples=found.total, labels=found.labels, predictions=found.predictions, hits=found.hits, ignored=ignored
        )

    def of_group(self, group: int) -> LabelScores | None:
        """Return the counts of a group; None without an example, or of too many labels."""
        has_room = self._scores.shape[1] <= MAX_LABELS and bool(self._scores[group].any())
        return _scores(self._scores[group]) if has_room else None

    def whole(self) -> LabelScores:
        """Return the counts of all groups."""
        return _scores(self._scores.sum(0))


def _scores(counts: Tensor) -> LabelScores:
    positives, negatives = (tuple(map(tuple, counts[:, side].tolist())) for side in (0, 1))
    return LabelScores.model_construct(positives=positives, negatives=negatives)


class NumberTally:
    """Sums over the examples of a regression, by group. `deviation` is the unit of standardised targets."""

    def __init__(self, groups: int, deviation: float) -> None:
        self._sums = torch.zeros(groups, 5, dtype=torch.float64)
        """The examples, their absolute and squared errors, their targets and these squared."""
        self.deviation = deviation

    def add(self, logits: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add examples by their outputs [examples, 1] and standardised targets [examples]."""
        made, true = (each.detach().cpu().double().reshape(-1) for each in (logits, labels))
        error = made - true
        of_each = [torch.ones_like(error), error.abs() * self.deviation, error.square(), true, true.square()]
        self._sums.index_add_(0, groups, torch.stack(of_each, 1))

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        self._sums = ranks.total(self._sums)

    def total(self, ignored: tuple[int, ...] = ()) -> NumberSums:
        """Return the sums of all groups."""
        return _sums(self._sums.sum(0))

    def of_group(self, group: int) -> NumberSums | None:
        """Return the sums of a group; None without an example."""
        return _sums(self._sums[group]) if self._sums[group, 0] else None


def _sums(of: Tensor) -> NumberSums:
    examples, absolute, squared, targets, targets_squared = of.tolist()
    spread = targets_squared - targets**2 / (examples or 1)
    return NumberSums.model_construct(
        examples=int(examples),
        absolute=absolute,
        squared=squared,
        targets=targets,
        # Of equal targets, rounding alone is left.
        spread=spread if spread > 1e-9 * targets_squared else 0.0,
    )


Entity = tuple[int, int, int]
"""The place of an entity's type, its first word and the word after its last one."""


class EntityTally:
    """Counts of the entities in words with classes in the scheme IOB2, by group of examples."""

    def __init__(self, groups: int, tags: Sequence[tuple[str, int]]) -> None:
        self.tags = tags
        self._counts = torch.zeros(groups, 5, len(tags), dtype=torch.int64)
        """At the first class of each type, the counts in the order of `EntityCounts`."""

    def add(self, predicted: Tensor, true: Tensor, counted: Tensor, groups: Tensor) -> None:
        """Count the entities of texts by the classes of their tokens, int64 [texts, tokens].

        The mask `counted`, bool of the same shape, selects the tokens that stand for words.
        """
        for made, right, words, group in zip(
            predicted.cpu(), true.cpu(), counted.cpu(), groups.tolist(), strict=True
        ):
            found = overlaps(*(entities(classes[words].tolist(), self.tags) for classes in (right, made)))
            for number, places in enumerate(found):
                self._counts[group, number] += torch.bincount(torch.tensor(places).long(), minlength=len(self.tags))

    def sum_over(self, ranks: Ranks) -> None:
        """Add the counts of all ranks."""
        self._counts = ranks.total(self._counts)

    def total(self) -> EntityCounts:
        """Return the counts of all groups."""
        return _entities(self._counts.sum(0))

    def of_group(self, group: int) -> EntityCounts:
        """Return the counts of a group."""
        return _entities(self._counts[group])


def _entities(counts: Tensor) -> EntityCounts:
    rows: dict[str, Any] = dict(zip(EntityCounts.model_fields, map(tuple, counts.tolist()), strict=True))
    return EntityCounts.model_construct(None, **rows)


def tags_of(names: Sequence[str]) -> list[tuple[str, int]] | None:
    """Return for each class its part, `B`, `I` or `O`, and the place of the first class of its type, -1 for `O`.

    None if the classes are not of entities: `O`, and others that begin with `B-` or `I-`.
    """
    others = [name for name in names if name != "O"]
    if len(others) == len(names) or not others or not all(name[:2] in ("B-", "I-") and name[2:] for name in others):
        return None
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        first.setdefault(name[2:], place)
    return [("O", -1) if name == "O" else (name[0], first[name[2:]]) for name in names]


def entities(classes: Sequence[int], tags: Sequence[tuple[str, int]]) -> list[Entity]:
    """Return the entities in the classes of words.

    As conlleval and seqeval count them, an entity also begins at an `I-` that follows another type, or none.
    """
    found, begin, current = list[Entity](), 0, -1
    for place, (part, kind) in enumerate([*(tags[each] for each in classes), ("O", -1)]):
        if part == "I" and kind == current:
            continue
        if current >= 0:
            found.append((current, begin, place))
        begin, current = place, kind
    return found


def overlaps(true: Sequence[Entity], made: Sequence[Entity]) -> Iterator[list[int]]:
    """Yield the types of true entities, of predicted ones, of hits, of true ones that a predicted one of the type
    overlaps, and of predicted ones that overlap a true one of the type."""
    yield [kind for kind, *_ in true]
    yield [kind for kind, *_ in made]
    yield [kind for kind, *_ in set(true) & set(made)]
    for ones, others in ((true, made), (made, true)):
        words = {(kind, word) for kind, begin, end in others for word in range(begin, end)}
        yield [kind for kind, begin, end in ones if any((kind, word) in words for word in range(begin, end))]
