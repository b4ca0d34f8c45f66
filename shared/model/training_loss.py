"""The training loss that a run's settings ask for, and the models that have it."""

from collections.abc import Iterator, Mapping

from tessera.shared.model.dataset_schema import class_count, class_names
from tessera.shared.model.spec import Head, Model
from tessera.shared.near_names import did_you_mean
from tessera.shared.run_settings import Training

TOKEN_HEADS: tuple[Head, ...] = ("masked-lm", "causal-lm", "seq2seq-lm")
"""Heads whose classes are the tokens of a vocabulary."""


def loss_faults(training: Training, model: Model) -> Iterator[tuple[str, str]]:
    """Yield each setting of the training loss that the model cannot have, with the reason and the remedy."""
    classes = class_count(model)
    kind = f"{model.config['model_type']} for {model.head}"
    if training.label_smoothing and classes is None and model.head not in TOKEN_HEADS:
        said = f"smooths labels that are classes or tokens, and those of this {kind} are neither"
        yield "label_smoothing", f"{said}: leave it out, or make a model of another head, or of several classes"
    given = training.class_weights
    if given is not None and (fault := _weights_fault(given, model, classes, kind)):
        yield "class_weights", fault
    if training.loss == "dpo":
        yield from _preference_faults(training, model, kind)


def _preference_faults(training: Training, model: Model, kind: str) -> Iterator[tuple[str, str]]:
    if model.head != "causal-lm":
        said = f"compares answers of a language model, and this is a {kind}"
        yield "loss", f"{said}: leave it out, or make a model with --head causal-lm"
    if model.lora is None or model.prompts:
        has = "prompts" if model.prompts else "no adapters"
        said = f"trains adapters alone, beside a base that every version shares, and the model has {has}"
        yield "loss", f"{said}: create it with `tessera model init --lora-rank 8`, or leave loss out"
    if training.full_fine_tuning:
        yield "full_fine_tuning", 'trains the base, with which loss = "dpo" compares: leave one of them out'
    for name in ("label_smoothing", "class_weights"):
        if getattr(training, name):
            yield name, 'changes a loss of labels, and loss = "dpo" has none: leave it out'


def _weights_fault(
    given: tuple[float, ...] | Mapping[str, float], model: Model, classes: int | None, kind: str
) -> str | None:
    if classes is None:
        remedy = "leave it out, or make a model of several classes"
        return f"weighs classes, and labels of this {kind} are no classes: {remedy}"
    if not isinstance(given, Mapping):
        if len(given) == classes:
            return None
        return f"has {len(given)} weights, and the model has {classes} classes: give one for each, in their order"
    names = class_names(model)
    if len(names) != classes:
        said = f"names classes, and `id2label` of the model's config names {len(names)} of {classes}"
        return f"{said}: give a list of {classes} weights"
    if unknown := [name for name in given if name not in names]:
        return f"names {unknown[0][:64]!r}, which is no class of the model{did_you_mean(unknown[0], names)}"
    return None


def class_weights_of(training: Training, model: Model) -> tuple[float, ...] | None:
    """Return the weight of each class, in the order of the classes. The settings have no `loss_faults`."""
    if isinstance(training.class_weights, Mapping):
        return tuple(training.class_weights.get(name, 1.0) for name in class_names(model))
    return training.class_weights
