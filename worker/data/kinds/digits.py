"""The handwritten digits of scikit-learn, for trials: 1,797 images of 8 x 8 pixels, ten classes."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Adapter, Dataset, Options, schema_of
from tessera.worker.data.normalization import PixelNormalization

TEST_SHARE = 0.2
BRIGHTEST = 16


class DigitsOptions(Options):
    split: Literal["train", "test"] = Field(
        default="train", description="test: a fifth of the examples, the same at every site"
    )


def digits(options: DigitsOptions) -> Dataset:
    """Return `pixel_values` float32 [n, 1, 8, 8] in [-1, 1] and `labels` int64 [n].

    The test split is a stratified fifth of the images, the same at every site.
    """
    images, labels, splits = _read()
    rows = splits[options.split]
    pixels = images[rows, np.newaxis] / (BRIGHTEST / 2) - 1
    tensors = {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels[rows])}
    schema = schema_of(tensors, {"pixel_values": (1, 8, 8), "labels": ()}, classes=10)
    return Dataset(tensors, schema=schema, normalization=PixelNormalization((0.5,), (0.5,)))


@cache
def _read() -> tuple[Array, Array, Mapping[str, Array]]:
    """Return images float32 [1797, 8, 8] from 0 to 16, labels int64 [1797], and the rows of each split.

    Each process parses the text once. Indexing by rows copies, so no caller can change the arrays.
    """
    bunch = load_digits()
    labels = bunch.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_SHARE, stratify=labels, random_state=0)
    return bunch.images.astype(np.float32), labels, {"train": np.sort(train), "test": np.sort(test)}


ADAPTER = Adapter("digits", DigitsOptions, digits)
