"""Figures of an evaluation that one example moves by at most one step.

Each example adds no more than its share to each of a few sums. The sums are rounded to multiples of a fixed step of
five times the most that replacing one example changes, and every figure is computed from the rounded sums. A step
hides no example: beside a boundary between two multiples, one example still moves a sum by a step. Noise hides it:
where the site sets `figures_privacy`, all sums of an evaluation together have discrete Gaussian noise (Canonne,
Kamath and Steinke 2020, arXiv 2004.00010) before they are rounded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from statistics import fmean

import structlog
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tessera.shared.api.class_counts import BINS, ENTITY_SCORES, MAX_CLASSES, f1_of_entities
from tessera.shared.methods.base import UnsupportedRun
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.errors import InputMismatch, is_machine_failure
from tessera.worker.model.forward import IGNORED, counted_labels, forward
from tessera.worker.privacy.bounded_numbers import (
    LEAST_OF_CLASS,
    FigureNoise,
    LabelSums,
    Leaving,
    RoundedSums,
    TargetSums,
)
from tessera.worker.privacy.known_examples import known_examples
from tessera.worker.training.batches import ReadableBatches
from tessera.worker.training.context import LocalTaskContext, synthetic_batch
from tessera.worker.training.evaluate import ROWS, OwnMetrics, PredictionCounts, texts_once
from tessera.worker.training.input_mismatch import rehearsal_fault
from tessera.worker.training.ranks import Ranks
from tessera.worker.training.tallies import LabelTally, entities, overlaps

DISCLOSED = ("steps", "effective_steps")
"""The metrics that a method may report. They follow from the settings and the number of examples."""

LEAST_FOR_CALIBRATION = 200
"""Fewest examples whose calibration error leaves. With fewer its step is above .05."""

SQUARES = {"right": 1, "loss": 1, "gaps": 1, "by_class": 6, "entities": 5}
"""The square of the distance by which replacing one example moves a sum, in units of its most: two labels, two
predictions and two right predictions may change, by one each, and each of five sums of entities."""


def disclosed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of training that do not depend on the examples' content."""
    return {name: value for name, value in metrics.items() if name in DISCLOSED}


class BoundedSums(RoundedSums):
    """Sums over examples. One with several scored labels adds the mean over them, so that it counts as one."""

    def __init__(self, classes: int, tags: Sequence[tuple[str, int]] | None = None) -> None:
        """`tags` are those of `tallies.tags_of` if words have the classes of entities."""
        self.clip = 2 * math.log(classes)
        """The largest loss of a label, and the loss of an example that cannot be scored: twice that of a guess."""
        self.misses = 0
        """Examples that cannot be scored, or have no scored label: each is wrong."""
        self.right_and_loss = torch.zeros(2, dtype=torch.float64)
        self.gaps = torch.zeros(BINS, dtype=torch.float64)
        """Of each bin of confidence, the sum of the confidences less that of the right predictions."""
        self.by_class = torch.zeros(3, classes if classes <= MAX_CLASSES else 0, dtype=torch.float64)
        """Of each class, [3, classes]: its right predictions, its predictions and its true labels."""
        self.entities = torch.zeros(5, dtype=torch.float64)
        """Of all entities, in the order of `EntityCounts`. A text adds at most one to each."""
        self._tags = tags

    def add(self, logits: Tensor, true: Tensor) -> None:
        """Add one example by the logits of its scored labels, [labels, classes], and these labels, int64 [labels]."""
        if not len(true):
            self.misses += 1
            return
        made = list[Tensor]()
        # A vocabulary is large, so a few rows at a time.
        for rows, labels in zip(torch.split(logits, ROWS), torch.split(true, ROWS), strict=True):
            losses = cross_entropy(rows.float(), labels, reduction="none").double()
            finite = losses.isfinite()
            # Logits that are not finite have no order.
            highest, predicted = torch.where(finite[:, None], rows.float().softmax(dim=1), 1.0).max(dim=1)
            right = ((predicted == labels) & finite).double()
            losses = torch.where(finite, losses, self.clip).clamp(0, self.clip)
            weights = torch.full_like(right, 1 / len(true))
            self.right_and_loss += torch.stack([right @ weights, losses @ weights]).cpu()
            bins = (highest * BINS).ceil().long().clamp(1, BINS).cpu() - 1
            self.gaps.index_add_(0, bins, ((highest - right) * weights).cpu())
            if self.by_class.numel():
                self.by_class[0].index_add_(0, labels.cpu(), (right * weights).cpu())
                self.by_class[1].index_add_(0, predicted.cpu(), weights.cpu())
                self.by_class[2].index_add_(0, labels.cpu(), weights.cpu())
            made.append(predicted.cpu())
        if self._tags:
            of_each = (entities(classes.tolist(), self._tags) for classes in (true, torch.cat(made)))
            counts = [len(kinds) for kinds in overlaps(*of_each)]
            self.entities += torch.tensor(counts) / max(counts[0], counts[1], 1)

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        self.misses = ranks.examples(self.misses)
        self.right_and_loss = ranks.total(self.right_and_loss)
        self.gaps, self.by_class = ranks.total(self.gaps), ranks.total(self.by_class)
        self.entities = ranks.total(self.entities)

    def rounded(self, examples: int, noise: FigureNoise | None = None) -> dict[str, Tensor]:
        """Return the rounded sums over these examples that may leave, float64, by name.

        Without noise, replacing one example moves each value by at most one step.
        """
        right, loss = self.right_and_loss
        leaving = {"right": (right, 1.0), "loss": (loss + self.misses * self.clip, self.clip)}
        if examples >= LEAST_FOR_CALIBRATION:
            # Two bins change, by no more than one each.
            leaving["gaps"] = (self.gaps.abs().sum(), 2.0)
        if self.by_class.numel() and examples >= LEAST_OF_CLASS * self.by_class.shape[1]:
            leaving["by_class"] = (self.by_class, 1.0)
        if self._tags:
            leaving["entities"] = (self.entities, 1.0)
        return self.rounded_with({name: Leaving(*each, SQUARES[name]) for name, each in leaving.items()}, noise)

    def figures(
        self, examples: int, noise: FigureNoise | None = None, ignored: tuple[int, ...] = ()
    ) -> dict[str, float]:
        """Return the `accuracy` and the clipped `loss` of these examples and, of enough, the `calibration_error` and
        the `macro_f1`, without classes at the places `ignored`; of entities their scores, in which each text
        has the same weight. All follow from the rounded sums and the number of
        examples."""
        sums = {name: each.clamp(min=0) for name, each in self.rounded(examples, noise).items()}
        found = {
            "accuracy": min(1.0, float(sums["right"]) / examples),
            "loss": min(self.clip, float(sums["loss"]) / examples),
        }
        if "gaps" in sums:
            found["calibration_error"] = min(1.0, float(sums["gaps"]) / examples)
        by_class = sums["by_class"].T.tolist() if "by_class" in sums else []
        occurring = [each for n, each in enumerate(by_class) if each[1] + each[2] and n not in ignored]
        if occurring:
            found["macro_f1"] = fmean(min(1.0, 2 * right / (made + true)) for right, made, true in occurring)
        if "entities" in sums and (scores := f1_of_entities(*sums["entities"].tolist())):
            found |= {name: min(1.0, value) for name, value in zip(ENTITY_SCORES, scores, strict=True)}
        return found | self.own.means(examples, sums)


FigureSums = BoundedSums | LabelSums | TargetSums


def bounded_sums(
    context: LocalTaskContext,
    dataset: Dataset,
    device: torch.device,
    check: Callable[[], None],
    ranks: Ranks,
    own: OwnMetrics | None = None,
) -> FigureSums:
    """Return the sums over a data set's examples, of all ranks. `own` gets the output and the labels of each.

    No example can make this fail. Each passes through the model alone and padded, so that it changes no other's
    logits, not even by rounding. Leaves the model in evaluation mode. Raises InputMismatch and UnsupportedRun, which
    depend on no example.
    """
    dataset, model, head = dataset.padded(), context.model, context.head
    sums = _empty_sums(context, dataset)
    known = ranks.rows(known_examples(context, dataset, synthetic_batch(model, dataset)))
    model.train(mode=False)
    share = ranks.share_of(dataset)
    with torch.inference_mode(), texts_once(model, head, dataset, ranks) as start_batch:
        for place, batch in zip(count(), ReadableBatches(share, ranks.size, device), strict=False):
            check()
            start_batch()
            # The last batch may have no row for this rank.
            is_known = place < len(known) and bool(known[place]) and LABELS in batch
            if not is_known:
                sums.misses += place < len(known)
                ranks.take_part(model, head, dataset)
                continue
            try:
                output = forward(model, head, batch, objective=context.preference)
            except Exception as fault:
                # Of a divided model, the other ranks would wait for this one.
                if is_machine_failure(fault) or ranks.shards > 1:
                    raise
                structlog.get_logger("worker").warning("example-not-scored", exc_info=fault)
                sums.misses += 1
                continue
            logits = output.logits
            assert logits is not None  # noqa: S101  (as the synthetic example shows)
            if own:
                own(output, batch[LABELS])
            labels = counted_labels(head, batch[LABELS])
            if not isinstance(sums, BoundedSums):
                sums.add(logits, labels)
                continue
            scored = labels != IGNORED
            sums.add((logits[:, :-1] if head == "causal-lm" else logits)[scored], labels[scored])
    sums.sum_over(ranks)
    return sums


def _empty_sums(context: LocalTaskContext, dataset: Dataset) -> FigureSums:
    """Return the sums for the labels of a data set, by the model's logits for a synthetic example.

    Raises InputMismatch for a model that does not fit the data set, and UnsupportedRun for one whose figures an
    example may move without a bound, as the losses of pairs in a batch.
    """
    found: list[FigureSums] = []
    config, task = context.model.config, PredictionCounts()
    task.prepare(config, context.head, dataset.inputs[LABELS])

    def look(batch: dict[str, Tensor]) -> None:
        output, labels = forward(context.model, context.head, batch, objective=context.preference), batch[LABELS]
        logits = output.logits
        if logits is None:
            return
        if isinstance(task.numbers, LabelTally):
            found.append(LabelSums(logits.shape[-1]))
        elif task.numbers:
            found.append(TargetSums(task.numbers.deviation))
        elif logits.shape[:-1] == labels.shape and not labels.is_floating_point() and logits.shape[-1] > 1:
            found.append(BoundedSums(logits.shape[-1], task.entities.tags if task.entities else None))

    if fault := rehearsal_fault(context, dataset, look):
        raise InputMismatch(
            f"the model gives no output for a synthetic example of the data set ({dataset.schema}). Rounded figures "
            "pad texts to the data set's max_length, which the model must accept."
        ) from fault
    if not found:
        raise UnsupportedRun(
            f"no figures: they leave rounded here, and the loss of this {context.model.config.model_type} for "
            f"{context.head} on the data set ({dataset.schema}) is of no two or more classes, so that one example "
            "may move it without a bound"
        )
    return found[0]
