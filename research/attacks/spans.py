"""Recovery of words from the span of an update of queries, keys or values in the first layer.

DAGER, Petrov et al. 2024, arXiv 2405.15586. The gradient of such a matrix is a sum over all words of the batch of an
outer product with the word's input to the layer. With fewer words than the layer is wide, a candidate, a word at a
place, was there if and only if its input lies in the span of the gradient's rows. Inputs of the first layer depend on
the word and its place alone.
"""

from __future__ import annotations

import numpy as np
import torch

from attacks.site import Release, Version
from attacks.subjects import LENGTH, WORDS
from common.arrays import Array
from tessera.worker.data.dataset import Dataset

MATRICES = ("layer.0.attention.self.value.weight", "layer.0.attention.self.query.weight",
            "layer.0.attention.self.key.weight")  # fmt: skip


def words_in_place(released: Release, data: Dataset) -> float | None:
    """Return the share of the words that are found at their places; None if no such matrix was sent.

    At each place as many words are named as there are examples, those nearest to the span.
    """
    sent = [name for ending in MATRICES if (name := released.sent(ending))]
    if not sent:
        return None
    texts = data.tensors["input_ids"].numpy()
    basis = _span(np.concatenate([_unit(released.steps[name]) for name in sent]), texts.size)
    candidates = inputs_of_first_layer(released.version)  # [places, words, width]
    outside = 1 - np.square(candidates @ basis).sum(axis=2)
    nearest = np.argsort(outside, axis=1, kind="stable")[:, : len(texts)]
    return float(np.mean([np.isin(texts[:, place], nearest[place]).mean() for place in range(LENGTH)]))


def words_in_place_by_chance(data: Dataset) -> float:
    """Return the share that a guess finds."""
    return data.examples / WORDS


def _unit(matrix: Array) -> Array:
    scaled: Array = matrix / max(np.linalg.norm(matrix), 1e-30)
    return scaled


def _span(rows: Array, dimensions: int) -> Array:
    """Return an orthonormal basis of the main directions of the rows, [width, at most dimensions]."""
    _, weights, directions = np.linalg.svd(rows, full_matrices=False)
    # What is smaller is the rounding of float32.
    kept = min(dimensions, len(weights) - 1, int((weights > 1e-6 * weights[0]).sum()))
    found: Array = directions[:kept].T
    return found


def inputs_of_first_layer(version: Version) -> Array:
    """Return the input of each word at each place, of length 1, float64 [places, words, width]."""
    embeddings = version.build().get_submodule("bert.embeddings")
    with torch.no_grad():
        ids = torch.arange(WORDS).unsqueeze(1).expand(-1, LENGTH)
        found = embeddings(input_ids=ids).double().numpy().transpose(1, 0, 2)
    lengths: Array = np.linalg.norm(found, axis=2, keepdims=True)
    inputs: Array = found / lengths
    return inputs
