"""The conversion of bytes of pixels to a model's `pixel_values`, and its inverse. Loaders import this module."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = (255.0,)
"""The largest byte."""


@dataclass(frozen=True)
class PixelNormalization:
    """Conversion of bytes, uint8 [images, height, width, channels], to float32 [images, channels, height, width], on
    the device of the bytes: values in 0 to 1, less `mean`, divided by `std`, each for all channels or for each."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float | None = None
    """The factor that takes bytes to 0 to 1, multiplied in float64 as transformers does; None divides by 255."""

    def __call__(self, pixels: Tensor) -> Tensor:
        # Division by a tensor, because by a number a GPU multiplies with its rounded inverse.
        most, mean, std = (pixels.new_tensor(each, dtype=torch.float32) for each in (MOST, self.mean, self.std))
        scaled = pixels if self.scale is None else pixels.double().mul_(self.scale)
        values = _mapped(pixels.shape).copy_(scaled) if pixels.device.type == "cpu" else scaled.float()
        if self.scale is None:
            values.div_(most)
        return values.sub_(mean).div_(std).permute(0, 3, 1, 2)

    def inverse(self, values: Tensor) -> Tensor:
        """Return the nearest bytes, uint8 [images, height, width, channels], to values [images, channels, height,
        width]."""
        most, mean, std = (torch.tensor(each, dtype=torch.float32) for each in (MOST, self.mean, self.std))
        shown = values.permute(0, 2, 3, 1).float().mul(std).add_(mean)
        shown = shown.mul_(most) if self.scale is None else shown.div_(self.scale)
        return shown.round_().clamp_(0, 255).to(torch.uint8)


def _mapped(shape: Sequence[int]) -> Tensor:
    """Return a float32 tensor in pages of its own, which go back to the system with it.

    The C library's heap was seen to grow by each batch that it gave room to, up to a gigabyte.
    """
    if not math.prod(shape):
        # A rank may have no row of a batch, and no memory is mapped for none.
        return torch.empty(shape)
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(*shape)
