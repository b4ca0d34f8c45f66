"""How well a version does on a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tessera.shared.model.spec import Head
from tessera.worker.model.forward import IGNORED, forward
from tessera.worker.training.progress import Check
from tessera.worker.training.trainer import Batches, TrainingDiverged

CALIBRATION_BINS = 15
ROWS = 256


@dataclass(frozen=True)
class _Scored:
    """What was predicted beside what is true, one entry for each label that counts."""

    predicted: Tensor  # int64 [labels]
    true: Tensor  # int64 [labels]
    confidence: Tensor  # float32 [labels]: the probability given to what was predicted

    def __len__(self) -> int:
        return len(self.true)


def evaluate(model: PreTrainedModel, head: Head, batches: Batches, check: Check) -> dict[str, float]:
    """Return the mean `loss` over what is scored and, for models that classify, `accuracy`, `macro_f1` and
    `calibration_error`.

    Every label position counts alike; macro F1 is over the classes that occur among the true or predicted labels.
    Leaves the model in evaluation mode. Raises TrainingDiverged for a loss that is not a number.
    """
    model.train(mode=False)
    losses: list[tuple[float, int]] = []
    scored: list[_Scored] = []
    with torch.inference_mode():
        for batch in batches:
            check()
            output = forward(model, head, batch)
            found = _scored(output.logits, batch["labels"], head)
            scored += [found] if found else []
            losses.append((float(output.loss), len(found) if found else len(batch["labels"])))
    loss = sum(value * count for value, count in losses) / max(1, sum(count for _, count in losses))
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the version's loss on this data is {loss}")
    return {"loss": loss, **_scores(scored)}


def calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """Return the expected calibration error: how far the model's confidence is from how often it is right.

    `confidence` [labels] is the probability of each prediction, `correct` [labels] whether it was right. Fifteen bins
    of equal width, open below and closed above; the gaps between a bin's accuracy and its mean confidence, weighted
    by how many predictions are in it (Guo et al. 2017, arXiv 1706.04599, equations 2, 3 and 5).
    """
    confidence, correct = confidence.double(), correct.double()
    edges = torch.linspace(0, 1, CALIBRATION_BINS + 1, dtype=torch.float64)
    # Rounding may take a probability above one, which belongs in the last bin.
    bins = torch.bucketize(confidence, edges).clamp(1, CALIBRATION_BINS) - 1
    surplus = torch.zeros(CALIBRATION_BINS, dtype=torch.float64).index_add_(0, bins, confidence - correct)
    return float(surplus.abs().sum() / len(confidence))


def macro_f1(predicted: Tensor, true: Tensor) -> float:
    """Return the mean of each class's F1, which is twice its hits over how often it is predicted and how often it is
    true; of those classes that occur. `predicted` and `true` are int64 [labels].

    Not scikit-learn's, with which it agrees: to import that would take every worker some 100 MiB.
    """
    classes, places = torch.cat([predicted, true]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    guessed, meant = places.chunk(2)
    hits, guesses, meanings = (
        torch.bincount(some, minlength=len(classes)).double() for some in (meant[guessed == meant], guessed, meant)
    )
    return float((2 * hits / (guesses + meanings)).mean())


def _scored(logits: Tensor | None, labels: Tensor, head: Head) -> _Scored | None:
    """Predictions beside the labels that count. None where there are no classes to tell apart."""
    if logits is None or logits.shape[-1] < 2 or labels.is_floating_point():
        return None
    highest, predicted = logits.max(dim=-1)  # [examples] or [examples, positions]
    confidence = (highest.float() - _logsumexp(logits)).exp()
    if head == "causal-lm":
        # A position predicts the one after it.
        predicted, confidence, labels = predicted[:, :-1], confidence[:, :-1], labels[:, 1:]
    if predicted.shape != labels.shape:
        return None
    counts = labels != IGNORED
    return _Scored(predicted[counts].cpu(), labels[counts].cpu(), confidence[counts].cpu())


def _logsumexp(logits: Tensor) -> Tensor:
    """Over the classes, in float32 whatever the logits are, a few rows at a time: a vocabulary may be large."""
    rows = torch.split(logits.flatten(0, -2), ROWS)  # [rows, classes] each
    return torch.cat([part.float().logsumexp(dim=-1) for part in rows]).reshape(logits.shape[:-1])


def _scores(scored: list[_Scored]) -> dict[str, float]:
    if not any(map(len, scored)):
        return {}
    predicted = torch.cat([found.predicted for found in scored])
    true = torch.cat([found.true for found in scored])
    confidence = torch.cat([found.confidence for found in scored])
    return {
        "accuracy": float((predicted == true).double().mean()),
        "macro_f1": macro_f1(predicted, true),
        "calibration_error": calibration_error(confidence, predicted == true),
    }
