"""Counts of predictions that add up over sites, and the scores that follow from their sums."""

from collections.abc import Sequence
from math import exp
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from tessera.shared.schema import Label, Message

BINS = 15
"""Bins of confidence of equal width, open below and closed above."""

MAX_CLASSES = 1_000
"""The most classes whose counts leave a site: a vocabulary has more, and its counts would be counts of words."""

MAX_MATRIX = 20
"""The most classes whose confusion matrix and score histograms leave a site."""

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

    @model_validator(mode="after")
    def _are_of_the_same_labels(self) -> Self:
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
        """Return the `accuracy`, the `calibration_error` and, if a class occurs that is not ignored, the `macro_f1`.
        There must be a label."""
        # A class's F1 is twice its hits over the sum of its predictions and its true labels. Equal to scikit-learn's,
        # whose import would take every worker about 100 MiB.
        by_class = enumerate(zip(self.hits, self.predictions, self.labels, strict=True))
        occurs = [each for place, each in by_class if each[1] + each[2] and place not in self.ignored]
        f1 = [2 * hits / (predicted + true) for hits, predicted, true in occurs]
        # The expected calibration error (Guo et al. 2017, arXiv 1706.04599, equations 2, 3 and 5): the mean gap
        # between accuracy and mean confidence over the bins, weighted by the number of predictions in each.
        gaps = [abs(s - hits) for s, hits in zip(self.bin_confidence, self.bin_hits, strict=True)]
        return {
            "accuracy": sum(self.hits) / self.total,
            **({"macro_f1": fmean(f1)} if f1 else {}),
            "calibration_error": sum(gaps) / self.total,
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

    @model_validator(mode="after")
    def _are_of_the_same_labels(self) -> Self:
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


SubgroupCounts = Annotated[dict[Label, ScoreCounts], Field(max_length=MAX_SUBGROUPS + 1)]
"""Counts by the value of a subgroup column; of a run without one, all under `ALL`."""

ALL, OTHER = "all", "other"
"""The names of all examples, and of those whose value of the subgroup column the site's settings do not name."""


def sum_of(counts: Sequence[ScoreCounts]) -> ScoreCounts:
    """Return the sum of counts of the same classes."""

    def added(name: str) -> tuple[tuple[int, ...], ...]:
        rows = zip(*(getattr(each, name) for each in counts), strict=True)
        return tuple(tuple(map(sum, zip(*row, strict=True))) for row in rows)

    return ScoreCounts.model_construct(None, **{name: added(name) for name in ScoreCounts.model_fields})


def can_pool(counts: Sequence[ClassCounts | None]) -> bool:
    """Return True if there are counts, none is missing, and all are of the same classes."""
    return None not in counts and len({(len(each.labels), each.ignored) for each in counts if each}) == 1


def pooled(counts: Sequence[ClassCounts | None]) -> ClassCounts | None:
    """Return the sum of counts; None unless they can be pooled."""
    if not can_pool(counts):
        return None
    sums: dict[str, Any] = {
        name: tuple(map(sum, zip(*(getattr(each, name) for each in counts), strict=True)))
        for name in ClassCounts.model_fields
        if name != "ignored"
    }
    sums["ignored"] = next(each.ignored for each in counts if each)
    return ClassCounts.model_construct(**sums)
