"""Recovery of labels and of an image's feature from one step on the text prompts of a dual encoder.

With the feature f of each image, the gradient of the prompts is a sum over classes of J a: J is the gradient of the
class's text feature by the prompts, which anyone with the version computes, and a is the sum of f times the
probability of the class, less 1 for the label. For the mean feature of any images, four unknowns are left: the
excesses of the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from attacks.closed_form import counted_right
from attacks.site import Release, Version
from attacks.subjects import CLASS_TEXTS, CLASSES, pairs
from common.arrays import Array
from tessera.worker.data.dataset import Dataset

BLOCK = "prompts.text"
SCALE = "logit_scale"
RIDGE = 1e-6
"""Of the least squares for a feature, as a share of the mean squared length of a row of the Jacobian."""


def label_counts(released: Release, data: Dataset) -> float | None:
    """Return the share of the labels that are counted right; None if the prompts were not sent."""
    if BLOCK not in released.steps:
        return None
    images, _ = _features(released.version, pairs(12345, 256))
    logits, jacobian = _scale(released.version) * images @ _texts(released.version).T, _jacobian(released.version)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
    rows = _scale(released.version) * np.einsum("cdp,d->pc", jacobian, images.mean(axis=0))
    excess = np.linalg.lstsq(rows, released.gradients[BLOCK].ravel(), rcond=None)[0]
    # The excesses of all classes add up to zero; of their sum, the prompts' gradient says little.
    excess -= excess.mean()
    return counted_right((probabilities - excess) * released.examples, data.tensors["labels"])


def feature(released: Release, data: Dataset) -> float | None:
    """Return the cosine between the feature of the only image and what the update says it is, both less the mean
    feature of other images; None if the prompts were not sent."""
    if BLOCK not in released.steps:
        return None
    jacobian = _jacobian(released.version)
    rows = jacobian.reshape(-1, jacobian.shape[2]).T  # [prompt values, classes * width]
    weights = rows.T @ rows
    weights[np.diag_indices_from(weights)] += RIDGE * np.trace(weights) / len(weights)
    found = np.linalg.solve(weights, rows.T @ released.gradients[BLOCK].ravel()).reshape(CLASSES, -1)
    # The label is the class whose excess is below zero; the feature is in the main direction of all rows.
    direction = np.linalg.svd(found)[2][0]
    mean = _features(released.version, pairs(12345, 256))[0].mean(axis=0)
    direction = direction * np.sign(direction @ mean)
    true = _features(released.version, data)[0][0] - mean
    guess = direction - mean
    return float(true @ guess / (np.linalg.norm(true) * np.linalg.norm(guess)))


def for_label_counts(version: Version) -> Version:
    """Return the version with a small scale of the logits, so that all classes are equally likely for any image."""
    return version.changed({SCALE: np.asarray(-3.0)})


def _scale(version: Version) -> float:
    return float(np.exp(version.values[SCALE]))


def _outputs(version: Version, pixels: Tensor, values: Mapping[str, Tensor] | None = None) -> Any:
    inputs = {"input_ids": CLASS_TEXTS, "pixel_values": pixels}
    model = version.build()
    return model(**inputs) if values is None else functional_call(model, dict(values), (), inputs)


def _features(version: Version, data: Dataset) -> tuple[Array, Array]:
    """Return the features of the images and of the classes' texts, of length 1, float64."""
    with torch.no_grad():
        output = _outputs(version, data.tensors["pixel_values"])
    return output.image_embeds.double().numpy(), output.text_embeds.double().numpy()


def _texts(version: Version) -> Array:
    return _features(version, pairs(0, 1))[1]


def _jacobian(version: Version) -> Array:
    """Return the gradient of each value of each class's feature by the prompts, [classes, width, prompt values]."""
    prompts = torch.from_numpy(version.values[BLOCK].copy()).requires_grad_()
    texts = _outputs(version, pairs(0, 1).tensors["pixel_values"], {BLOCK: prompts}).text_embeds
    rows = [torch.autograd.grad(value, prompts, retain_graph=True)[0] for value in texts.flatten()]
    return torch.stack(rows).double().numpy().reshape(*texts.shape, -1)
