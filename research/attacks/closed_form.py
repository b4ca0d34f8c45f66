"""Recovery in closed form from one step: words, labels and features, without any optimization.

Words: only the rows of words in the batch have a gradient. Labels: the mean gradient of the head's bias is the mean
of the probabilities less the shares of the labels (Zhao, Mopuri and Bilen 2020, arXiv 2001.02610). Features: of one
example, each row of the head's gradient is the bias' times the feature (Geiping et al. 2020, arXiv 2003.14053).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from attacks.site import Release, Version
from attacks.subjects import CLASSES, WORDS, texts
from common.arrays import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.forward import forward

BIAS, WEIGHT = "classifier.bias", "classifier.weight"
EMBEDDING = "word_embeddings.weight"
LAST_NORM = "encoder.layer.1.output.LayerNorm.bias"
RARE = CLASSES - 1
"""The class that `for_one_example` makes unlikely."""


# ---------------------------------------------------------------- words


def words(released: Release, data: Dataset) -> float | None:
    """Return the share of the batch's words among the rows that moved most, as many as there are words; None if the
    embeddings were not sent."""
    name = released.sent(EMBEDDING)
    if name is None:
        return None
    there = np.unique(data.tensors["input_ids"].numpy())
    moved = np.linalg.norm(released.steps[name], axis=1)
    found = np.argsort(-moved, kind="stable")[: len(there)]
    return float(np.isin(found, there).mean())


def words_by_chance(data: Dataset) -> float:
    """Return the share that a guess finds."""
    return len(np.unique(data.tensors["input_ids"].numpy())) / WORDS


# ---------------------------------------------------------------- labels


def label_counts(released: Release, data: Dataset) -> float | None:
    """Return the share of the labels that are counted right, from the head's bias or, without it, from the last
    normalization's; None if neither was sent."""
    version = released.version
    if name := released.sent(BIAS):
        excess = released.gradients[name]
    elif name := released.sent(LAST_NORM):
        excess = np.linalg.lstsq(_norm_by_logit(version), released.gradients[name], rcond=None)[0]
    else:
        return None
    shares = _probabilities(version) - excess
    return counted_right(shares * released.examples, data.tensors["labels"])


def counted_right(counts: Array, labels: Tensor) -> float:
    """Return the share of the labels that these counts by class have right, scaled to the number of labels."""
    true = np.bincount(labels.numpy(), minlength=CLASSES)
    positive = np.maximum(counts, 0)
    scaled = positive * true.sum() / max(positive.sum(), 1e-12)
    return float(np.minimum(np.rint(scaled), true).sum() / true.sum())


def label_counts_by_chance(data: Dataset) -> float:
    """Return the share that equal counts have right."""
    labels = data.tensors["labels"]
    return counted_right(np.full(CLASSES, len(labels) / CLASSES), labels)


def _probabilities(version: Version) -> Array:
    """Return the mean probabilities of the classes on texts of the attacker's own, [classes]."""
    own = texts(12345, 256)
    with torch.no_grad():
        logits = forward(version.build(), version.model.head, own.tensors).logits
    assert logits is not None  # noqa: S101 (for the types)
    found: Array = torch.softmax(logits.double(), dim=1).mean(dim=0).numpy()
    return found


def _norm_by_logit(version: Version) -> Array:
    """Return the gradient of each logit by the bias of the last normalization, [width, classes], where the tanh of
    the pooler is about linear. The bias acts on the first position alone, by the pooler and the head."""
    pooler, head = (
        version.values[version.block(name)].astype(np.float64) for name in ("pooler.dense.weight", WEIGHT)
    )
    found: Array = (head @ pooler).T
    return found


# ---------------------------------------------------------------- features


def features_of(version: Version, data: Dataset) -> Array:
    """Return the inputs of the head for each example, float64 [examples, width]: what an attack looks for."""
    model, seen = version.build(), list[Tensor]()
    handle = model.get_submodule("classifier").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        forward(model, version.model.head, data.tensors)
    handle.remove()
    found: Array = seen[0].double().numpy()
    return found


def feature(released: Release, data: Dataset) -> float | None:
    """Return the cosine between the feature of the only example and what the head's update says it is; None if the
    head was not sent."""
    return _cosine_of_row(released, data, None)


def rare_feature(released: Release, data: Dataset) -> float | None:
    """Return the same for the only example of the rare class, among others, under `for_one_example`."""
    return _cosine_of_row(released, data, RARE)


def _cosine_of_row(released: Release, data: Dataset, row: int | None) -> float | None:
    weight, bias = released.sent(WEIGHT), released.sent(BIAS)
    if weight is None or bias is None:
        return None
    gradient, by_row = released.gradients[weight], released.gradients[bias]
    place = 0
    if row is None:
        row = int(np.argmax(np.abs(by_row)))
    else:
        place = data.tensors["labels"].tolist().index(row)
    true, found = features_of(released.version, data)[place], gradient[row] / by_row[row]
    return float(true @ found / (np.linalg.norm(true) * np.linalg.norm(found)))


# ---------------------------------------------------------------- crafted versions


def for_label_counts(version: Version) -> Version:
    """Return the version with a head of nearly zeros, so that all classes are equally likely for any example."""
    return version.changed(
        {
            version.block(WEIGHT): version.values[version.block(WEIGHT)] / 1000,
            version.block(BIAS): np.zeros(CLASSES),
        }
    )


def for_one_example(version: Version) -> Version:
    """Return the version with a head that gives one class no chance: its row then moves by examples of that class
    alone, and if there is one, by its feature."""
    values: Mapping[str, Array] = {version.block(BIAS): np.where(np.arange(CLASSES) == RARE, -20.0, 0.0)}
    return version.changed(values)
