"""Evaluation of a version on a data set."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tessera.shared.model.spec import Head
from tessera.worker.model.forward import IGNORED, forward
from tessera.worker.training.batches import Batches
from tessera.worker.training.divergence import TrainingDiverged
from tessera.worker.training.progress import Check

CALIBRATION_BINS = 15
ROWS = 256


@dataclass(frozen=True)
class _Scored:
    """Predictions and true labels, one entry for each scored label."""

    predicted: Tensor  # int64 [labels]
    true: Tensor  # int64 [labels]
    confidence: Tensor  # float32 [labels]: the probability of the prediction

    def __len__(self) -> int:
        return len(self.true)


def evaluate(model: PreTrainedModel, head: Head, batches: Batches, check: Check) -> dict[str, float]:
    """Return the mean `loss` and, for classification, `accuracy`, `macro_f1` and `calibration_error`.

    Every scored label has the same weight; macro F1 is over the classes among the true or predicted labels. Leaves
    the model in evaluation mode. Raises TrainingDiverged for a loss that is not finite.
    """
    model.train(mode=False)
    losses: list[tuple[float, int]] = []
    scored: list[_Scored] = []
    with torch.inference_mode():
        for batch in batches:
            check()
            output = forward(model, head, batch)
            predictions = _scored(output.logits, batch["labels"], head)
            scored += [predictions] if predictions else []
            losses.append((float(output.loss), len(predictions or batch["labels"])))
    loss = sum(value * count for value, count in losses) / max(1, sum(count for _, count in losses))
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the version's loss on this data is {loss}")
    return {"loss": loss, **_scores(scored)}


def calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """Return the expected calibration error (Guo et al. 2017, arXiv 1706.04599, equations 2, 3 and 5).

    `confidence` [labels] is the probability of each prediction, `correct` [labels] whether it is right. It is the
    mean gap between accuracy and mean confidence over fifteen bins of equal width, open below and closed above,
    weighted by the number of predictions in each bin.
    """
    confidence, correct = confidence.double(), correct.double()
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=torch.float64)
    # A probability that rounding moved above one belongs to the last bin.
    bins = torch.bucketize(confidence, edges).clamp(1, CALIBRATION_BINS) - 1
    surplus = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, confidence - correct)
    return float(surplus.abs().sum() / len(confidence))


def macro_f1(predicted: Tensor, true: Tensor) -> float:
    """Return the mean F1 over the classes that occur in `predicted` or `true`, int64 [labels] each.

    A class's F1 is twice its hits over the sum of its predictions and its true labels. Equal to scikit-learn's, whose
    import would take every worker about 100 MiB.
    """
    classes, places = torch.cat([predicted, true]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    predicted, true = places.chunk(2)
    hits, predictions, positives = (
        torch.bincount(some, minlength=len(classes)).double() for some in (true[predicted == true], predicted, true)
    )
    return float((2 * hits / (predictions + positives)).mean())


def _scored(logits: Tensor | None, labels: Tensor, head: Head) -> _Scored | None:
    """Return the predictions for the scored labels, or None if there are no classes to predict."""
    if logits is None or logits.shape[-1] < 2 or labels.is_floating_point():
        return None
    highest, predicted = logits.max(dim=-1)  # [examples] or [examples, positions]
    confidence = (highest.float() - _logsumexp(logits)).exp()
    if head == "causal-lm":
        # Each position predicts the next one.
        predicted, confidence, labels = predicted[:, :-1], confidence[:, :-1], labels[:, 1:]
    if predicted.shape != labels.shape:
        return None
    counts = labels != IGNORED
    return _Scored(predicted[counts].cpu(), labels[counts].cpu(), confidence[counts].cpu())


def _logsumexp(logits: Tensor) -> Tensor:
    """Return the logsumexp over the classes in float32, computed a few rows at a time: a vocabulary may be large."""
    rows = torch.split(logits.flatten(0, -2), ROWS)  # [rows, classes] each
    return torch.cat([part.float().logsumexp(dim=-1) for part in rows]).reshape(logits.shape[:-1])


def _scores(scored: list[_Scored]) -> dict[str, float]:
    if not any(map(len, scored)):
        return {}
    predicted, true, confidence = (
        torch.cat([getattr(each, name) for each in scored]) for name in ("predicted", "true", "confidence")
    )
    return {
        "accuracy": float((predicted == true).double().mean()),
        "macro_f1": macro_f1(predicted, true),
        "calibration_error": calibration_error(confidence, predicted == true),
    }
