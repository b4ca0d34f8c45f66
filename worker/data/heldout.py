"""Setting some of a site's examples aside, to measure a model on what it was not trained on."""

from __future__ import annotations

import numpy as np
import torch

from worker.data.dataset import DataError, Dataset


def hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """The data set without a share of its examples, which are its `held_out`.

    Drawn at random, and where each example has a class, from every class in proportion, give or take one. There is at
    least one example on either side. Raises DataError if there is only one.
    """
    if dataset.examples < 2:
        raise DataError("held_out: of one example none can be held out")
    rng = np.random.default_rng(seed)
    order = rng.permutation(dataset.examples)
    if dataset.classes is not None:
        order = order[np.argsort(dataset.classes.numpy()[order], kind="stable")]
    wanted = min(max(round(share * dataset.examples), 1), dataset.examples - 1)
    # Every so many examples of those sorted by class, from a random place on: a systematic sample.
    places = np.floor((np.arange(wanted) + rng.random()) * dataset.examples / wanted).astype(np.int64)
    held = np.zeros(dataset.examples, bool)
    held[order[places]] = True
    kept, out = (dataset.rows(torch.from_numpy(np.flatnonzero(chosen))) for chosen in (~held, held))
    return Dataset(kept.tensors, kept.common, out, kept.domains, kept.padding)
