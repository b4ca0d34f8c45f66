"""Evaluation of an exported model with transformers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForImageClassification
from transformers.utils import logging

from tessera.worker.data.kinds.digits import DigitsOptions, digits


@dataclass(frozen=True)
class Scores:
    accuracy: float
    macro_f1: float


def measure(folder: Path) -> Scores:
    """Return accuracy and macro F1 of a folder's model on the test images."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
    images = digits(DigitsOptions(split="test")).tensors
    with torch.inference_mode():
        predicted = model(pixel_values=images["pixel_values"]).logits.argmax(dim=-1)
    true = images["labels"]
    return Scores(float(accuracy_score(true, predicted)), float(f1_score(true, predicted, average="macro")))
