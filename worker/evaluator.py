"""How well a version does on a data set."""

from __future__ import annotations

import math

import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from transformers import PreTrainedModel

from shared.model import Head
from worker.trainer import Batches, Check, TrainingDiverged

IGNORED = -100
"""The label of positions that are not scored, in transformers' models and in ours."""

Scored = tuple[Tensor, Tensor]
"""Predicted and true labels, int64 [labels] each."""


def evaluate(model: PreTrainedModel, head: Head, batches: Batches, check: Check) -> dict[str, float]:
    """The mean `loss` over what is scored and, for models that classify, `accuracy` and `macro_f1`.

    Every label position counts alike; macro F1 is over the classes that occur among the true or predicted labels.
    Leaves the model in evaluation mode. Raises TrainingDiverged for a loss that is not a number.
    """
    model.train(mode=False)
    losses: list[tuple[float, int]] = []
    scored: list[Scored] = []
    with torch.inference_mode():
        for batch in batches:
            check()
            output = model(**batch)
            found = _scored(output.get("logits"), batch["labels"], head)
            scored += [found] if found else []
            losses.append((float(output.loss), len(found[1]) if found else len(batch["labels"])))
    loss = sum(value * count for value, count in losses) / max(1, sum(count for _, count in losses))
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the version's loss on this data is {loss}")
    return {"loss": loss, **_scores(scored)}


def _scored(logits: Tensor | None, labels: Tensor, head: Head) -> Scored | None:
    """Predictions beside the labels that count. None where there are no classes to tell apart."""
    if logits is None or logits.shape[-1] < 2 or labels.is_floating_point():
        return None
    predicted = logits.argmax(dim=-1)  # [examples] or [examples, positions]
    if head == "causal-lm":
        # A position predicts the one after it.
        predicted, labels = predicted[:, :-1], labels[:, 1:]
    if predicted.shape != labels.shape:
        return None
    counts = labels != IGNORED
    return predicted[counts].cpu(), labels[counts].cpu()


def _scores(scored: list[Scored]) -> dict[str, float]:
    if not scored:
        return {}
    predicted = torch.cat([found[0] for found in scored]).numpy()
    true = torch.cat([found[1] for found in scored]).numpy()
    return {
        "accuracy": float(accuracy_score(true, predicted)),
        "macro_f1": float(f1_score(true, predicted, average="macro", zero_division=0.0)),
    }
