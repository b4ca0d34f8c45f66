"""The training loss that a run's settings ask for, and the models that have it."""

from collections.abc import Iterator

from tessera.shared.model.dataset_schema import class_count
from tessera.shared.model.spec import Head, Model
from tessera.shared.run_settings import Training

TOKEN_HEADS: tuple[Head, ...] = ("masked-lm", "causal-lm", "seq2seq-lm")
"""Heads whose classes are the tokens of a vocabulary."""


def loss_faults(training: Training, model: Model) -> Iterator[tuple[str, str]]:
    """Yield each setting of the training loss that the model cannot have, with the reason and the remedy."""
    classes = class_count(model)
    if training.label_smoothing and classes is None and model.head not in TOKEN_HEADS:
        kind = f"{model.config['model_type']} for {model.head}"
        said = f"smooths labels that are classes or tokens, and those of this {kind} are neither"
        yield "label_smoothing", f"{said}: leave it out, or make a model of another head, or of several classes"
