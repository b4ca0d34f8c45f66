"""Random changes of images while training (`training.augmentation` of a run), drawn for each example by itself.

They are changes of bytes of pixels, or of the values of `pixel_values` if these are not known to come from bytes.
Loaders import this module: it imports kornia only when images are changed.
"""

import importlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.shared.model.dataset_schema import PIXELS
from tessera.shared.run_settings import Augmentation, Training
from tessera.shared.tensors.hashing import derive_seed
from tessera.worker.data.dataset import Dataset, Rows
from tessera.worker.data.normalization import PixelNormalization

TRANSFORMS = "tessera.worker.data.image_transforms"


@dataclass(frozen=True)
class SeededAugmentation:
    """An augmentation whose seed and an example's place in its data set decide the changes of that example."""

    settings: Augmentation
    seed: int

    def derived(self, *names: object) -> "SeededAugmentation":
        """Return the augmentation with a seed that depends on this one and on `names`."""
        return replace(self, seed=derive_seed(self.seed, "augmentation", *names))

    def of(self, dataset: Dataset, rows: Tensor) -> "RowAugmentation":
        """Return the augmentation of the examples at the places `rows`, int64 [rows]."""
        return RowAugmentation(self.settings, self.seed, dataset.normalization, rows.numpy())


@dataclass(frozen=True, eq=False, repr=False)
class RowAugmentation:
    """The augmentation of some rows."""

    settings: Augmentation
    seed: int
    normalization: PixelNormalization | None
    places: NDArray[np.int64]

    def __call__(self, rows: Rows) -> Rows:
        """Return the rows with their images changed, if they have images: as bytes if they are bytes."""
        if PIXELS not in rows or not len(self.places):
            return rows
        return {**rows, PIXELS: self._changed(rows[PIXELS])}

    def _changed(self, pixels: Tensor) -> Tensor:
        as_bytes = pixels.dtype == torch.uint8
        if not as_bytes and self.normalization:
            return self.normalization(self._changed(self.normalization.inverse(pixels))).to(pixels.dtype)
        transform = importlib.import_module(TRANSFORMS).transform
        values = pixels.permute(0, 3, 1, 2).float() / 255 if as_bytes else pixels.float()
        seeds = [derive_seed(self.seed, place) for place in self.places.tolist()]
        changed: Tensor = transform(values, self.settings, seeds)
        if as_bytes:
            return changed.mul(255).round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        return changed.to(pixels.dtype)


def augmentation_of(training: Training, seed: int) -> SeededAugmentation | None:
    """Return the augmentation of a run's training, if it has one."""
    return SeededAugmentation(training.augmentation, seed) if training.augments else None


def augmented(augmentation: SeededAugmentation | None, dataset: Dataset, rows: Tensor, read: Rows) -> Rows:
    """Return the inputs `read` of the examples at the places `rows`, augmented if there is an augmentation."""
    return augmentation.of(dataset, rows)(read) if augmentation else read
