"""The handwritten digits that come with scikit-learn: 1,797 images of 8 x 8, ten classes. For trying things out."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shared.blocks import Frozen
from worker.data.dataset import Adapter, Dataset, Options
from worker.data.partition import dirichlet

TEST_SHARE = 0.2
BRIGHTEST = 16


class Shards(Frozen):
    """Which of `count` sites' shares of the training part this is, `index` counting from 0."""

    count: PositiveInt = Field(le=1000)
    index: NonNegativeInt
    alpha: float = Field(default=1.0, gt=0, description="small: each site has few classes; large: all are alike")
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.index >= self.count:
            raise ValueError(f"index {self.index} is not below count {self.count}")
        return self


class DigitsOptions(Options):
    part: Literal["train", "test"] = "train"
    shards: Shards | None = None

    @model_validator(mode="after")
    def _test_is_whole(self) -> Self:
        if self.part == "test" and self.shards:
            raise ValueError("the test part is central and is not divided: leave shards out")
        return self


def digits(options: DigitsOptions) -> Dataset:
    """`pixel_values` float32 [n, 1, 8, 8] in [-1, 1] and `labels` int64 [n].

    The test part is a fifth, the same at every site, with every class in proportion.
    """
    bunch = load_digits()
    images = bunch.images.astype(np.float32)  # [1797, 8, 8], 0 to 16
    labels = bunch.target.astype(np.int64)  # [1797]
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_SHARE, stratify=labels, random_state=0)
    rows = np.sort(test if options.part == "test" else train)
    if options.shards:
        shards = options.shards
        rows = rows[dirichlet(labels[rows], shards.count, shards.alpha, shards.seed)[shards.index]]
    pixels = images[rows, np.newaxis] / (BRIGHTEST / 2) - 1
    return Dataset({"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels[rows])})


ADAPTER = Adapter("digits", DigitsOptions, digits)
