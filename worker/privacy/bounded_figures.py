"""Figures of an evaluation that one example moves by at most one step.

Each example adds no more than its share to each of a few sums. The sums are rounded to multiples of a fixed step of
five times the most that replacing one example changes, and every figure is computed from the rounded sums. A step
hides no example: beside a boundary between two multiples, one example still moves a sum by a step. Noise hides it:
where the site sets `figures_privacy`, all sums of an evaluation together have discrete Gaussian noise (Canonne,
Kamath and Steinke 2020, arXiv 2004.00010) before they are rounded.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import structlog
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tessera.shared.api.class_counts import BINS, MAX_CLASSES
from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.privacy.discrete_gaussian import discrete_gaussian
from tessera.shared.privacy.noise import NoiseSource
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.errors import InputMismatch, is_device_failure
from tessera.worker.model.forward import IGNORED, counted_labels, forward
from tessera.worker.privacy.known_examples import known_examples
from tessera.worker.training.batches import ReadableBatches
from tessera.worker.training.context import LocalTaskContext, synthetic_batch
from tessera.worker.training.evaluate import ROWS, texts_once
from tessera.worker.training.input_mismatch import rehearsal_fault
from tessera.worker.training.ranks import Ranks

STEP = 5
"""The step of a rounded sum, in units of the most that replacing one example changes."""

DISCLOSED = ("steps", "effective_steps")
"""The metrics that a method may report. They follow from the settings and the number of examples."""

LEAST_FOR_CALIBRATION = 200
"""Fewest examples whose calibration error leaves. With fewer its step is above .05."""

LEAST_OF_CLASS = 50
"""Fewest examples for each class, on average, whose macro F1 leaves: ten steps."""

GRID = 1024
"""Parts of the most that one example changes, to which a sum is rounded before it gets noise of whole parts."""

SQUARES = {"right": 1, "loss": 1, "gaps": 1, "by_class": 6}
"""The square of the distance by which replacing one example moves a sum, in units of its most: two labels, two
predictions and two right predictions may change, by one each."""


@dataclass(frozen=True)
class FigureNoise:
    """Noise for the figures of one evaluation, which costs `rho` in zCDP."""

    rho: float
    source: NoiseSource


def disclosed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of training that do not depend on the examples' content."""
    return {name: value for name, value in metrics.items() if name in DISCLOSED}


class BoundedSums:
    """Sums over examples. One with several scored labels adds the mean over them, so that it counts as one."""

    def __init__(self, classes: int) -> None:
        self.clip = 2 * math.log(classes)
        """The largest loss of a label, and the loss of an example that cannot be scored: twice that of a guess."""
        self.misses = 0
        """Examples that cannot be scored, or have no scored label: each is wrong."""
        self.right_and_loss = torch.zeros(2, dtype=torch.float64)
        self.gaps = torch.zeros(BINS, dtype=torch.float64)
        """Of each bin of confidence, the sum of the confidences less that of the right predictions."""
        self.by_class = torch.zeros(3, classes if classes <= MAX_CLASSES else 0, dtype=torch.float64)
        """Of each class, [3, classes]: its right predictions, its predictions and its true labels."""

    def add(self, logits: Tensor, true: Tensor) -> None:
        """Add one example by the logits of its scored labels, [labels, classes], and these labels, int64 [labels]."""
        if not len(true):
            self.misses += 1
            return
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

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        self.misses = ranks.examples(self.misses)
        self.right_and_loss = ranks.total(self.right_and_loss)
        self.gaps, self.by_class = ranks.total(self.gaps), ranks.total(self.by_class)

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
        if noise:
            # Rounding to the grid may move a value by one more part.
            distance = (GRID + 1) * math.sqrt(sum(SQUARES[name] for name in leaving))
            deviation = math.ceil(distance / math.sqrt(2 * noise.rho))
            leaving = {name: (_noisy(*each, deviation, noise.source), each[1]) for name, each in leaving.items()}
        return {name: (sums / (STEP * most)).round() * (STEP * most) for name, (sums, most) in leaving.items()}

    def figures(
        self, examples: int, noise: FigureNoise | None = None, ignored: tuple[int, ...] = ()
    ) -> dict[str, float]:
        """Return the `accuracy` and the clipped `loss` of these examples and, of enough, the `calibration_error` and
        the `macro_f1`, without classes at the places `ignored`. All follow from the rounded sums and the number of
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
        return found


def _noisy(sums: Tensor, most: float, deviation: int, source: NoiseSource) -> Tensor:
    """Return sums with noise of this standard deviation, in parts of the grid."""
    noise = torch.from_numpy(discrete_gaussian(source, deviation, sums.numel())).view(sums.shape)
    return ((sums / most * GRID).round() + noise) * (most / GRID)


def bounded_sums(
    context: LocalTaskContext, dataset: Dataset, device: torch.device, check: Callable[[], None], ranks: Ranks
) -> BoundedSums:
    """Return the sums over a data set's examples, of all ranks.

    No example can make this fail. Each passes through the model alone and padded, so that it changes no other's
    logits, not even by rounding. Leaves the model in evaluation mode. Raises InputMismatch and UnsupportedRun, which
    depend on no example.
    """
    dataset, model, head = dataset.padded(), context.model, context.head
    sums = BoundedSums(_classes(context, dataset))
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
                logits = forward(model, head, batch).logits
            except Exception as fault:
                # Of a divided model, the other ranks would wait for this one.
                if (
                    isinstance(fault, torch.OutOfMemoryError | MemoryError)
                    or is_device_failure(fault)
                    or ranks.shards > 1
                ):
                    raise
                structlog.get_logger("worker").warning("example-not-scored", exc_info=fault)
                sums.misses += 1
                continue
            assert logits is not None  # noqa: S101  (as the synthetic example shows)
            labels = counted_labels(head, batch[LABELS])
            scored = labels != IGNORED
            sums.add((logits[:, :-1] if head == "causal-lm" else logits)[scored], labels[scored])
    sums.sum_over(ranks)
    return sums


def _classes(context: LocalTaskContext, dataset: Dataset) -> int:
    """Return the number of classes of the model's logits for a synthetic example.

    Raises InputMismatch for a model that does not fit the data set, and UnsupportedRun for one whose figures an
    example may move without a bound: numbers that a model learns have none, nor have the losses of pairs in a batch.
    """
    found: list[int] = []

    def look(batch: dict[str, Tensor]) -> None:
        logits, labels = forward(context.model, context.head, batch).logits, batch[LABELS]
        if logits is not None and logits.shape[:-1] == labels.shape and not labels.is_floating_point():
            found.append(logits.shape[-1])

    if fault := rehearsal_fault(context, dataset, look):
        raise InputMismatch(
            f"the model gives no output for a synthetic example of the data set ({dataset.schema}). Rounded figures "
            "pad texts to the data set's max_length, which the model must accept."
        ) from fault
    if not found or found[0] < 2:
        raise UnsupportedRun(
            f"no figures: they leave rounded here, and the loss of this {context.model.config.model_type} for "
            f"{context.head} on the data set ({dataset.schema}) is of no two or more classes, so that one example "
            "may move it without a bound"
        )
    return found[0]
