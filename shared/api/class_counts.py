"""Counts of predictions that add up over sites, and the scores that follow from their sums."""

import operator
from collections.abc import Mapping, Sequence
from math import exp
from statistics import fmean
from typing import Annotated, Any, Self, TypeVar, cast

from pydantic import Field, model_validator

from tessera.shared.schema import MAX_NUMBER, Label, Message

BINS = 15
"""Bins of confidence of equal width, open below and closed above."""

MAX_CLASSES = 1_000
"""The most classes whose counts leave a site: a vocabulary has more, and its counts would be counts of words."""

MAX_MATRIX = 20
"""The most classes whose confusion matrix and score histograms leave a site."""

MAX_LABELS = 64
"""The most labels, of examples with several, whose score histograms leave a site."""

ENTITY_SCORES = ("entity_f1", "entity_partial_f1")

MAX_SUBGROUPS = 16
"""The most values of a subgroup column."""

SCORE_EDGES = tuple(1 / (1 + exp(-x / 4)) for x in range(-31, 32))
"""The edges of the bins of scores: probabilities whose logits are a quarter apart, from -7.75 to 7.75. Bins of equal
width would put most scores of a confident model into two of them."""

SCORE_BINS = len(SCORE_EDGES) + 1

ROUNDING = 1e-3
"""Relative error of a sum of three digits, and more."""

Count = Annotated[int, Field(ge=0, lt=1 << 40)]
ByClass = Annotated[tuple[Count, ...], Field(min_length=2, max_length=MAX_CLASSES)]


def f1_of_entities(
    true: float, made: float, hits: float, overlapped: float, overlapping: float
) -> tuple[float, float] | None:
    """Return the F1 of entities, exact and by overlap, from sums of the counts of `EntityCounts`; None without any.

    By overlap, the precision is the share of predicted entities that overlap a true one of their type, and the recall
    the share of true ones that a predicted one overlaps.
    """
    if not true + made:
        return None
    # Without true entities, or without predicted ones, nothing overlaps.
    precision, recall = overlapping / (made or 1), overlapped / (true or 1)
    partial = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return 2 * hits / (true + made), partial


class EntityCounts(Message):
    """Counts of entities, which are runs of words with classes such as `B-drug` and `I-drug`, at the place of the
    first class of each type; 0 at other classes."""

    labels: ByClass
    """True entities."""
    predictions: ByClass
    hits: ByClass
    """Predicted entities that are of the type, the beginning and the end of a true one."""
    overlapped: ByClass
    """True entities that share a word with a predicted entity of the type."""
    overlapping: ByClass
    """Predicted entities that share a word with a true entity of the type."""

    @model_validator(mode="after")
    def _are_of_the_same_entities(self) -> Self:
        by_class = (self.labels, self.predictions, self.hits, self.overlapped, self.overlapping)
        if len(set(map(len, by_class))) > 1:
            raise ValueError("the counts of entities are of different numbers of classes")
        if any(
            hits > min(found, right) or found > true or right > made
            for true, made, hits, found, right in zip(*by_class, strict=True)
        ):
            raise ValueError("a class has more hits than overlaps, or more overlaps than entities")
        return self

    def f1(self, place: int | None = None) -> tuple[float, float] | None:
        """Return `f1_of_entities` of the type at a place, or of all."""
        where = slice(None) if place is None else slice(place, place + 1)
        every = (self.labels, self.predictions, self.hits, self.overlapped, self.overlapping)
        return f1_of_entities(*(sum(each[where]) for each in every))

    def scores(self) -> dict[str, float]:
        """Return `entity_f1` and `entity_partial_f1` over the entities of all types; nothing without any."""
        found = self.f1()
        return dict(zip(ENTITY_SCORES, found, strict=True)) if found else {}


def _require_entities_of(labels: Sequence[int], entities: EntityCounts | None) -> None:
    if entities and len(entities.labels) != len(labels):
        raise ValueError(f"the counts of entities are of {len(entities.labels)} classes, of {len(labels)}")


class LabelCounts(Message):
    """Counts of an evaluation of examples that have several labels each, or none, by label."""

    examples: Count
    labels: ByClass
    """Examples with the label."""
    predictions: ByClass
    """Examples to which the model gives the label, with a probability from one half on."""
    hits: ByClass
    ignored: tuple[Count, ...] = Field(default=(), max_length=MAX_CLASSES)
    """The places of the labels that macro F1 leaves out."""

    @model_validator(mode="after")
    def _are_of_the_same_examples(self) -> Self:
        if len({len(self.labels), len(self.predictions), len(self.hits)}) > 1:
            raise ValueError("labels, predictions and hits are of different numbers of labels")
        by_label = zip(self.labels, self.predictions, self.hits, strict=True)
        if any(hits > min(true, made) or true + made - hits > self.examples for true, made, hits in by_label):
            raise ValueError("a label has more hits than examples or predictions, or more of these than examples")
        return self

    @property
    def total(self) -> int:
        """The number of examples, over which other metrics are means."""
        return self.examples

    def scores(self) -> dict[str, float]:
        """Return the `micro_f1` and, without ignored labels, the `macro_f1`, each over the labels that occur."""
        found = {"micro_f1": 2 * sum(self.hits) / made} if (made := sum(self.labels) + sum(self.predictions)) else {}
        f1 = _f1_by_class(self.labels, self.predictions, self.hits, self.ignored)
        return found | ({"macro_f1": fmean(f1)} if f1 else {})


Total = Annotated[float, Field(ge=0, le=MAX_NUMBER)]


class NumberSums(Message):
    """Sums over the examples of a regression, from which its scores are computed."""

    examples: Count
    absolute: Total
    """Of absolute errors, in the unit of the targets."""
    squared: Total
    """Of squared errors. These and the following are of standardised targets."""
    targets: Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
    spread: Total
    """Of squared distances of targets from their mean. It does not follow from a rounded sum of squares."""

    @property
    def total(self) -> int:
        """The number of examples."""
        return self.examples

    @property
    def labels(self) -> tuple[int, ...]:
        """The number of examples, as of one class."""
        return (self.examples,)

    def scores(self) -> dict[str, float]:
        """Return the mean absolute error `mae` and, if the targets differ, the coefficient of determination `r2`."""
        if not self.examples:
            return {}
        # A site may send any numbers, whose quotient may be infinite.
        r2 = {"r2": 1 - self.squared / self.spread} if self.spread > 1e-12 * self.squared else {}
        return {"mae": self.absolute / self.examples, **r2}


def _f1_by_class(
    labels: Sequence[int], predictions: Sequence[int], hits: Sequence[int], ignored: Sequence[int]
) -> list[float]:
    """Return the F1 of each class that occurs and is not ignored: twice its hits over the sum of its predictions and
    its true labels. Equal to scikit-learn's, whose import would take every worker about 100 MiB."""
    by_class = enumerate(zip(hits, predictions, labels, strict=True))
    occurs = [each for place, each in by_class if each[1] + each[2] and place not in ignored]
    return [2 * hits / (predicted + true) for hits, predicted, true in occurs]


class ClassCounts(Message):
    """Counts of an evaluation's scored labels and predictions, by class and by bin of confidence."""

    labels: ByClass
    predictions: ByClass
    hits: ByClass
    """Right predictions."""
    bin_predictions: Annotated[tuple[Count, ...], Field(min_length=BINS, max_length=BINS)]
    bin_hits: Annotated[tuple[Count, ...], Field(min_length=BINS, max_length=BINS)]
    bin_confidence: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1 << 41)], ...], Field(min_length=BINS, max_length=BINS)
    ]
    """The sum of the probabilities of the predicted classes."""
    ignored: tuple[Count, ...] = Field(default=(), max_length=MAX_CLASSES)
    """The places of the classes that macro F1 leaves out."""
    entities: EntityCounts | None = Field(default=None, exclude_if=operator.not_)
    """Counts of words whose classes begin and continue entities."""

    @model_validator(mode="after")
    def _are_of_the_same_labels(self) -> Self:
        _require_entities_of(self.labels, self.entities)
        by_class, by_bin = (self.labels, self.predictions, self.hits), (self.bin_predictions, self.bin_hits)
        if len(set(map(len, by_class))) > 1:
            raise ValueError("labels, predictions and hits are of different numbers of classes")
        if any(hits > min(others) for *others, hits in zip(*by_class, strict=True)):
            raise ValueError("a class has more hits than labels or predictions")
        if any(hits > count for count, hits in zip(*by_bin, strict=True)):
            raise ValueError("a bin of confidence has more hits than predictions")
        if any(s > n * (1 + ROUNDING) for s, n in zip(self.bin_confidence, self.bin_predictions, strict=True)):
            raise ValueError("a bin has a mean confidence above one")
        if not (self.total == sum(self.predictions) == sum(self.bin_predictions)):
            raise ValueError("the numbers of labels, of predictions and of predictions by bin have different sums")
        if sum(self.hits) != sum(self.bin_hits):
            raise ValueError("the hits by class and by bin have different sums")
        return self

    @property
    def total(self) -> int:
        """The number of scored labels."""
        return sum(self.labels)

    def scores(self) -> dict[str, float]:
        """Return the `accuracy`, the `calibration_error` and, if a class occurs that is not ignored, the `macro_f1`;
        of words with entities, their scores. There must be a label."""
        f1 = _f1_by_class(self.labels, self.predictions, self.hits, self.ignored)
        # The expected calibration error (Guo et al. 2017, arXiv 1706.04599, equations 2, 3 and 5): the mean gap
        # between accuracy and mean confidence over the bins, weighted by the number of predictions in each.
        gaps = [abs(s - hits) for s, hits in zip(self.bin_confidence, self.bin_hits, strict=True)]
        return {
            "accuracy": sum(self.hits) / self.total,
            **({"macro_f1": fmean(f1)} if f1 else {}),
            "calibration_error": sum(gaps) / self.total,
            **(self.entities.scores() if self.entities else {}),
        }


ByPrediction = Annotated[tuple[Count, ...], Field(min_length=2, max_length=MAX_MATRIX)]
ByScore = Annotated[tuple[Count, ...], Field(min_length=SCORE_BINS, max_length=SCORE_BINS)]


class ScoreCounts(Message):
    """Counts of the scored labels of one group of examples. All figures of a classifier follow from them."""

    confusion: Annotated[tuple[ByPrediction, ...], Field(min_length=2, max_length=MAX_MATRIX)]
    """[true class][predicted class]."""
    positives: Annotated[tuple[ByScore, ...], Field(min_length=2, max_length=MAX_MATRIX)]
    """[class][bin]: the labels of the class, by the probability that the model gives the class."""
    negatives: Annotated[tuple[ByScore, ...], Field(min_length=2, max_length=MAX_MATRIX)]
    """[class][bin]: all other labels, likewise."""
    entities: EntityCounts | None = Field(default=None, exclude_if=operator.not_)

    @model_validator(mode="after")
    def _are_of_the_same_labels(self) -> Self:
        _require_entities_of(self.labels, self.entities)
        of_class = [sum(row) for row in self.confusion]
        if {len(row) for row in (*self.confusion, self.positives, self.negatives)} != {len(of_class)}:
            raise ValueError("the confusion matrix and the histograms are of different numbers of classes")
        others = [sum(of_class) - labels for labels in of_class]
        if [*map(sum, self.positives)] != of_class or [*map(sum, self.negatives)] != others:
            raise ValueError("the histograms and the confusion matrix are of different labels")
        return self

    @property
    def labels(self) -> tuple[int, ...]:
        """The number of labels of each class."""
        return tuple(map(sum, self.confusion))

    @property
    def total(self) -> int:
        """The number of labels."""
        return sum(self.labels)


ByLabelScore = Annotated[tuple[ByScore, ...], Field(min_length=2, max_length=MAX_LABELS)]


class LabelScores(Message):
    """Counts of examples that have several labels each, or none, of one group. All figures of a label follow."""

    positives: ByLabelScore
    """[label][bin]: the examples with the label, by the probability that the model gives it."""
    negatives: ByLabelScore
    """[label][bin]: all other examples, likewise."""

    @model_validator(mode="after")
    def _are_of_the_same_examples(self) -> Self:
        if len({sum(map(sum, both)) for both in zip(self.positives, self.negatives, strict=True)}) > 1:
            raise ValueError("the histograms of labels are of different examples")
        return self

    @property
    def labels(self) -> tuple[int, ...]:
        """The number of examples with each label."""
        return tuple(map(sum, self.positives))

    @property
    def hits(self) -> tuple[int, ...]:
        """The number of examples with each label to which the model gives it: with a probability from one half on."""
        return tuple(sum(bins[SCORE_BINS // 2 :]) for bins in self.positives)

    @property
    def predictions(self) -> tuple[int, ...]:
        """The number of examples to which the model gives each label."""
        false = (sum(bins[SCORE_BINS // 2 :]) for bins in self.negatives)
        return tuple(map(sum, zip(self.hits, false, strict=True)))

    @property
    def total(self) -> int:
        """The number of examples."""
        return sum(self.positives[0]) + sum(self.negatives[0])


Counts = ClassCounts | LabelCounts | NumberSums
"""The counts of an evaluation, by the task of the model."""
GroupCounts = ScoreCounts | LabelScores | NumberSums
"""The counts of one group of examples."""

SubgroupCounts = Annotated[dict[Label, GroupCounts], Field(max_length=MAX_SUBGROUPS + 1)]
"""Counts by the value of a subgroup column; of a run without one, all under `ALL`."""

ALL, OTHER = "all", "other"
"""The names of all examples, and of those whose value of the subgroup column the site's settings do not name."""


def counts_of(stored: Mapping[str, Any]) -> Counts:
    """Return counts that were validated on arrival, from their JSON."""
    kind: type[Counts]
    kind = NumberSums if "absolute" in stored else LabelCounts if "examples" in stored else ClassCounts
    found: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in stored.items()}
    if entities := stored.get("entities"):
        found["entities"] = EntityCounts.model_construct(None, **{name: tuple(of) for name, of in entities.items()})
    return kind.model_construct(None, **found)


G = TypeVar("G", bound=Message)


def sum_of(counts: Sequence[G]) -> G:
    """Return the sum of counts of the same classes; `ignored` is that of the first."""
    first = counts[0]
    names = [name for name in type(first).model_fields if name != "ignored"]
    sums: dict[str, Any] = {name: _added([getattr(each, name) for each in counts]) for name in names}
    if "ignored" in type(first).model_fields:
        sums |= first.model_dump(include={"ignored"})
    if isinstance(first, NumberSums):
        sums["spread"] += _spread_of_means(cast("Sequence[NumberSums]", counts))
    return cast("G", type(first).model_construct(None, **sums))


def _spread_of_means(counts: Sequence[NumberSums]) -> float:
    """Return the sum over examples of the squared distance of their own sums' mean target from that of all."""
    some = [each for each in counts if each.examples]
    means, examples = [each.targets / each.examples for each in some], [each.examples for each in some]
    whole = fmean(means, examples) if some else 0.0
    return sum(count * (mean - whole) ** 2 for count, mean in zip(examples, means, strict=True))


def _added(values: Sequence[Any]) -> Any:
    if any(value is None for value in values):
        return None
    if isinstance(values[0], Message):
        return sum_of(values)
    if isinstance(values[0], int | float):
        return sum(values)
    of_each = zip(*values, strict=True)
    numbers = isinstance(values[0][0], int | float)
    return tuple(map(sum, of_each)) if numbers else tuple(_added(each) for each in of_each)


def can_pool(counts: Sequence[Counts | None]) -> bool:
    """Return True if there are counts, none is missing, and all are of the same task and classes."""
    return None not in counts and len({_kind(each) for each in counts if each}) == 1


def _kind(counts: Counts) -> tuple[object, ...]:
    ignored, entities = getattr(counts, "ignored", ()), getattr(counts, "entities", None)
    return type(counts), len(counts.labels), ignored, entities is None


def pooled(counts: Sequence[Counts | None]) -> Counts | None:
    """Return the sum of counts; None unless they can be pooled."""
    return sum_of([each for each in counts if each]) if can_pool(counts) else None
