"""Evaluation of a version on a data set."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tessera.shared.api.class_counts import (
    BINS,
    MAX_MATRIX,
    SCORE_BINS,
    SCORE_EDGES,
    ClassCounts,
    Counts,
    GroupCounts,
    ScoreCounts,
)
from tessera.shared.methods.base import Output
from tessera.shared.metrics.classification import figures_of
from tessera.shared.model.dataset_schema import IDS, REGRESSION, target_scale
from tessera.shared.model.spec import Head
from tessera.shared.schema import SCORED_LABELS
from tessera.worker.data.dataset import LABELS, Dataset, RowsOnDisk
from tessera.worker.data.groups import Subgroups
from tessera.worker.errors import NoFiniteLoss
from tessera.worker.model.forward import IGNORED, NUMBER_HEADS, Preference, counted_labels, forward, losses
from tessera.worker.training.batches import Batches
from tessera.worker.training.progress import Check
from tessera.worker.training.ranks import OneRank, Ranks
from tessera.worker.training.tallies import EntityTally, LabelTally, NumberTally, tags_of

ROWS = 256
OwnMetrics = Callable[[Output, Tensor], None]
"""A function that gets the outputs and the labels of some examples."""
NO_LABELS = ": no example has a label that counts"


class PredictionCounts:
    """Counts of predictions, which add up over batches and over ranks."""

    def __init__(self, subgroups: Subgroups | None = None, examples: int = 0) -> None:
        self.losses = torch.zeros(examples, dtype=torch.float64)
        """The mean loss of each example's scored labels, [examples]: nan without any, infinite if not finite. Of no
        element to note none."""
        self.subgroups = subgroups
        """The subgroups of the data set by which scores are counted; None counts no scores."""
        self.confusion = torch.zeros(0, dtype=torch.int64)
        """[subgroups, true class, predicted class]; of no element for more than `MAX_MATRIX` classes."""
        self.scores = torch.zeros(0, dtype=torch.int64)
        """[subgroups, class, is the label of another class, bin of the class's probability]."""
        self.counts = torch.zeros(3, 0, dtype=torch.int64)
        """Of each class, [3, classes]: its right predictions, its predictions and its true labels."""
        self.numbers: LabelTally | NumberTally | None = None
        """The counts of several labels or of targets, in place of the others."""
        self.entities: EntityTally | None = None
        """Counts of words whose classes begin and continue entities."""
        self.bins = torch.zeros(3, BINS, dtype=torch.float64)
        """Of each bin of confidence: the number of predictions and of right ones, and the sum of the confidences."""

    def prepare(self, config: Any, head: Head, labels: Tensor | RowsOnDisk) -> None:
        """Make room for the labels of a task in which an example has none, one or several, or a number."""
        groups = len(self.subgroups.names) if self.subgroups else 1
        outputs, several = config.num_labels, len(labels.shape) > 1
        if labels.dtype.is_floating_point and head in NUMBER_HEADS:
            if several and config.problem_type != REGRESSION and labels.shape[1] == outputs > 1:
                self.numbers = LabelTally(groups, outputs)
            elif not several and outputs == 1:
                self.numbers = NumberTally(groups, target_scale(vars(config))[1])
        elif head == "token-classification":
            tags = tags_of([config.id2label.get(n, "") for n in range(outputs)])
            self.entities = EntityTally(groups, tags) if tags else None

    def places(self, rows: Tensor) -> Tensor:
        """Return the place of the subgroup of each of these examples."""
        return self.subgroups.places[rows] if self.subgroups else torch.zeros_like(rows)

    def add(self, predicted: Tensor, true: Tensor, confidence: Tensor, classes: int) -> None:
        """Count predictions and true labels, int64 [labels]. `confidence` [labels] is the probability of each
        prediction."""
        if not self.counts.numel():
            self.counts = torch.zeros(3, classes, dtype=torch.int64)
        correct = predicted == true
        some = (true[correct], predicted, true)
        self.counts += torch.stack([torch.bincount(each, minlength=classes) for each in some])
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
        # A probability that rounding moved above one belongs to the last bin.
        bins = torch.bucketize(confidence.double(), edges).clamp(1, BINS) - 1
        of_each = torch.stack([torch.ones_like(confidence), correct, confidence]).double()
        self.bins.index_add_(1, bins, of_each)

    def add_scores(self, probabilities: Tensor, predicted: Tensor, true: Tensor, subgroup: Tensor) -> None:
        """Count the probabilities [labels, classes] of labels whose subgroups are at these places [labels]."""
        classes = probabilities.shape[1]
        self._make_room(classes)
        places = torch.arange(classes).expand_as(probabilities)
        bins = torch.bucketize(probabilities.double(), torch.tensor(SCORE_EDGES, dtype=torch.float64), right=True)
        self.confusion.index_put_((subgroup, true, predicted), torch.tensor(1), accumulate=True)
        at = (subgroup[:, None].expand_as(places), places, (places != true[:, None]).long(), bins)
        self.scores.index_put_(at, torch.tensor(1), accumulate=True)

    def _make_room(self, classes: int) -> None:
        if self.subgroups and classes <= MAX_MATRIX and not self.confusion.numel():
            count = len(self.subgroups.names)
            self.confusion = torch.zeros(count, classes, classes, dtype=torch.int64)
            self.scores = torch.zeros(count, classes, 2, SCORE_BINS, dtype=torch.int64)

    def by_subgroup(self) -> dict[str, GroupCounts]:
        """Return the counts of each subgroup with a label."""
        names = self.subgroups.names if self.subgroups else ()
        if self.numbers:
            of_each = ((name, self.numbers.of_group(place)) for place, name in enumerate(names))
            return {name: counts for name, counts in of_each if counts}
        found: dict[str, GroupCounts] = {}
        for place, (name, confusion, scores) in enumerate(
            zip(names, self.confusion.tolist(), self.scores.tolist(), strict=False)
        ):
            if any(map(any, confusion)):
                positives, negatives = zip(*scores, strict=True)
                entities = self.entities.of_group(place) if self.entities else None
                found[name] = ScoreCounts(
                    confusion=confusion, positives=positives, negatives=negatives, entities=entities
                )
        return found

    def sum_over(self, ranks: Ranks) -> None:
        """Add the counts of all ranks. Rank 0 has a row of each batch, and so knows the number of classes."""
        if self.losses.numel():
            self.losses = ranks.total(self.losses)
        tallies: tuple[LabelTally | NumberTally | EntityTally | None, ...] = (self.numbers, self.entities)
        for tally in tallies:
            if tally:
                tally.sum_over(ranks)
        classes = ranks.same(lambda: self.counts.shape[1])
        if not self.counts.numel():
            self.counts = torch.zeros(3, classes, dtype=torch.int64)
        self.counts, self.bins = ranks.total(self.counts), ranks.total(self.bins)
        self._make_room(classes)
        if self.confusion.numel():
            self.confusion, self.scores = ranks.total(self.confusion), ranks.total(self.scores)

    def by_class(self, ignored: tuple[int, ...] = ()) -> Counts | None:
        """Return the counts; None without any scored label. `ignored` are places that macro F1 leaves out."""
        if self.numbers:
            return self.numbers.total(ignored)
        if not self.counts[2].any():
            return None
        hits, predictions, labels = (tuple(row) for row in self.counts.tolist())
        bin_predictions, bin_hits = (tuple(row) for row in self.bins[:2].long().tolist())
        return ClassCounts.model_construct(
            labels=labels,
            predictions=predictions,
            hits=hits,
            bin_predictions=bin_predictions,
            bin_hits=bin_hits,
            bin_confidence=tuple(self.bins[2].tolist()),
            ignored=ignored,
            entities=self.entities.total() if self.entities else None,
        )

    def figures(self, ignored: tuple[int, ...] = ()) -> dict[str, float]:
        """Return the scores of the counts, and the mean AUROC of several labels by histograms."""
        counts = self.by_class(ignored)
        found = counts.scores() if counts else {}
        if isinstance(self.numbers, LabelTally):
            overall = figures_of(self.numbers.whole(), draws=0).figures
            found |= {"macro_auroc": overall["macro_auroc"].value} if "macro_auroc" in overall else {}
        return found


def evaluate(
    model: PreTrainedModel,
    head: Head,
    batches: Batches,
    check: Check,
    ranks: Ranks | None = None,
    scores: PredictionCounts | None = None,
    ignored: tuple[int, ...] = (),
    own: OwnMetrics | None = None,
    objective: Preference | None = None,
) -> dict[str, float]:
    """Return the mean `loss` and, for classification, `accuracy`, `macro_f1` and `calibration_error`.

    Beside them are `entity_f1` and `entity_partial_f1` of words with entities, and in their place `micro_f1`,
    `macro_f1` and `macro_auroc` of several labels, or `mae` and `r2` of targets. Of chats `answer_log_likelihood` is
    the mean over them of the sum over their scored tokens. The number of scored labels, their
    weight over several data sets, is there where it is not the number of examples.

    Every scored label has the same weight; macro F1 is over the classes among the true or predicted labels, without
    those at the places `ignored`. Each of
    several `ranks` takes its rows of each batch: their counts add up exactly, and their losses up to rounding. The
    counts are added to `scores`, and `own` gets each batch's output and labels. Pairs of texts have the loss
    `objective`. Leaves the model in evaluation mode.
    Raises NoFiniteLoss, unless `scores` notes the loss of each example: there one example must not fail all.
    """
    ranks = ranks or OneRank()
    model.train(mode=False)
    scores, loss_sum, weight = scores or PredictionCounts(), 0.0, 0
    scores.prepare(model.config, head, batches.dataset.inputs[LABELS])
    with torch.inference_mode(), texts_once(model, head, batches.dataset, ranks) as start_batch:
        share = ranks.share_of(batches.dataset)
        for batch, rows in zip(replace(batches, dataset=share), share.order(batches.size), strict=True):
            check()
            start_batch()
            labels = batch[LABELS]
            # A rank may have no row of a batch, or none with a label.
            if not len(labels):
                ranks.take_part(model, head, batches.dataset)
                continue
            output = forward(model, head, batch, objective=objective)
            if own:
                own(output, labels)
            if scores.losses.numel():
                scores.losses[rows] = _losses(output, head, labels)
            count = _count(scores, output.logits, labels, head, rows)
            if count:
                loss_sum += float(output.loss) * count
                weight += count
    scores.sum_over(ranks)
    weight = ranks.examples(weight)
    loss = ranks.total(loss_sum) / weight if weight else math.nan
    if not (math.isfinite(loss) or scores.losses.numel()):
        raise NoFiniteLoss(f"the version's loss on this data is {loss}" + NO_LABELS * (not weight))
    counted = {SCORED_LABELS: float(weight)} if weight != batches.dataset.examples else {}
    found = {"loss": loss, **scores.figures(ignored), **counted}
    if batches.dataset.tokenizer:
        found["answer_log_likelihood"] = -loss * weight / batches.dataset.examples
    return found


class _TextStates:
    """The forward pass of a dual encoder's text tower, whose states are computed in the first batch alone.

    A method may pass the texts through the tower several times in a batch, with other prompts each time.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._states: list[Any] = []
        self._passes = 0

    def start_batch(self) -> None:
        self._passes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._passes == len(self._states):
            self._states.append(self._compute(*args, **kwargs))
        self._passes += 1
        # transformers writes projected features into the output that it receives.
        return copy(self._states[self._passes - 1])


@contextmanager
def texts_once(model: PreTrainedModel, head: Head, dataset: Dataset, ranks: Ranks) -> Iterator[Callable[[], None]]:
    """Have a dual encoder compute its texts in the first batch alone, if all examples have the same ones. Yield a
    function to call before each batch."""
    tower: Any = getattr(model, "text_model", None)
    # Ranks that share a tower's weights must all call it, also those that compute on a placeholder.
    if head != "contrastive" or tower is None or IDS not in dataset.common or ranks.shards > 1:
        yield lambda: None
        return
    tower.forward = states = _TextStates(tower.forward)
    try:
        yield states.start_batch
    finally:
        del tower.forward


def _losses(output: Output, head: Head, labels: Tensor) -> Tensor:
    """Return the loss of each example, float64 [examples]: nan without a label that counts, and infinite if it is not
    finite."""
    scored = (counted_labels(head, labels) != IGNORED).flatten(1).any(1) if labels.ndim > 1 else labels != IGNORED
    found = losses(output, head, labels).double()
    return torch.where(scored, torch.where(found.isfinite(), found, math.inf), math.nan).cpu()


def _count(scores: PredictionCounts, logits: Tensor | None, labels: Tensor, head: Head, rows: Tensor) -> int:
    """Add the predictions for the scored labels of the examples at the places `rows` to the scores. Return the number
    of these labels, or of the examples if there are no classes to predict."""
    if scores.numbers and logits is not None:
        scores.numbers.add(logits, labels, scores.places(rows))
    if logits is None or logits.shape[-1] < 2 or labels.is_floating_point():
        return len(labels)
    highest, predicted = logits.max(dim=-1)  # [examples] or [examples, positions]
    confidence = (highest.float() - _logsumexp(logits)).exp()
    if head == "causal-lm":
        # Each position predicts the next one.
        predicted, confidence, labels = predicted[:, :-1], confidence[:, :-1], labels[:, 1:]
    if predicted.shape != labels.shape:
        return len(labels)
    counts = labels != IGNORED
    if scores.entities:
        scores.entities.add(predicted, labels, counts, scores.places(rows))
    true = labels[counts].cpu()
    scores.add(predicted[counts].cpu(), true, confidence[counts].cpu(), logits.shape[-1])
    if scores.subgroups and logits.shape[-1] <= MAX_MATRIX:
        whose = scores.subgroups.places[rows].view(-1, *[1] * (labels.ndim - 1)).expand(labels.shape)
        shown = logits[:, :-1] if head == "causal-lm" else logits
        scores.add_scores(
            shown[counts].float().softmax(dim=-1).cpu(), predicted[counts].cpu(), true, whose[counts.cpu()]
        )
    return len(true)


def _logsumexp(logits: Tensor) -> Tensor:
    """Return the logsumexp over the classes in float32, computed a few rows at a time: a vocabulary may be large."""
    rows = torch.split(logits.flatten(0, -2), ROWS)  # [rows, classes] each
    return torch.cat([part.float().logsumexp(dim=-1) for part in rows]).reshape(logits.shape[:-1])
