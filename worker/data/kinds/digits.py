"""The handwritten digits of scikit-learn, for trials: 1,797 images of 8 x 8 pixels, ten classes."""

from typing import Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tessera.worker.data.dataset import Adapter, Dataset, Options, schema_of
from tessera.worker.data.normalization import Normalized

TEST_SHARE = 0.2
BRIGHTEST = 16


class DigitsOptions(Options):
    split: Literal["train", "test"] = "train"


def digits(options: DigitsOptions) -> Dataset:
    """Return `pixel_values` float32 [n, 1, 8, 8] in [-1, 1] and `labels` int64 [n].

    The test split is a stratified fifth of the images, the same at every site.
    """
    bunch = load_digits()
    images = bunch.images.astype(np.float32)  # [1797, 8, 8], 0 to 16
    labels = bunch.target.astype(np.int64)  # [1797]
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_SHARE, stratify=labels, random_state=0)
    rows = np.sort(test if options.split == "test" else train)
    pixels = images[rows, np.newaxis] / (BRIGHTEST / 2) - 1
    tensors = {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels[rows])}
    schema = schema_of(tensors, {"pixel_values": (1, 8, 8), "labels": ()}, classes=10)
    return Dataset(tensors, schema=schema, normalization=Normalized((0.5,), (0.5,)))


ADAPTER = Adapter("digits", DigitsOptions, digits)
