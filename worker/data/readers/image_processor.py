"""From image files to a model's `pixel_values`: by an image processor of transformers, or by plain options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from transformers import AutoImageProcessor

from tessera.worker.data.dataset import DataError, Options
from tessera.worker.data.readers.pretrained import load_pretrained

Picture = Path | bytes
"""An image's file, or what is in one."""

# Pictures as scanners, cameras and browsers write them. Pillow reads more, some by starting other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif"})

# What converting to eight bits a channel would clip rather than scale.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

# In each of these ways Pillow's readers say that a file is not what it begins as.
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    Image.DecompressionBombWarning,
    Image.DecompressionBombError,
)

MAX_SIDE = 1 << 14
AT_ONCE = 64
"""Images that are opened and prepared together."""

Prepare = Callable[[list[Image.Image]], dict[str, Tensor]]
"""From opened images to a model's inputs, [images, ...] each."""


class PixelOptions(Options):
    """How images become numbers: as `processor` says, or else by the others."""

    processor: str | None = Field(
        default=None, description="an image processor: a local folder, or a name on the hub"
    )
    size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="pixels on each side, or height and width; images are stretched to it"
    )
    channels: Literal[1, 3] = Field(default=3, description="1: grey, 3: colours; images are made so")
    mean: tuple[float, ...] = Field(default=(0.5,), description="taken from values in 0 to 1, of all or each channel")
    std: tuple[PositiveFloat, ...] = Field(default=(0.5,), description="by which what is left is divided")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.processor is None) == (self.size is None):
            raise ValueError("give processor, or else size")
        if self.processor is not None and self.model_fields_set & {"mean", "std"}:
            raise ValueError("mean and std are what the processor says: leave them out")
        if any(side > MAX_SIDE for side in self.shape):
            raise ValueError(f"size: {MAX_SIDE} pixels a side are the most")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ValueError(f"{name}: give one value, or one for each of {self.channels} channels")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, where the options say them."""
        return (self.size, self.size) if isinstance(self.size, int) else (self.size or (0, 0))


def inputs_of(pictures: Sequence[Picture], options: PixelOptions) -> dict[str, Tensor]:
    """`pixel_values` float32 [pictures, channels, height, width], and what else a processor gives.

    Raises DataError naming a picture that cannot be read, or the processor.
    """
    prepare = _plainly(options) if options.processor is None else _as_processor_says(options.processor)
    found: dict[str, Tensor] = {}
    done = 0
    # Filled in place, so that a large data set is not in memory twice.
    for images in _opened(pictures, "L" if options.channels == 1 else "RGB"):
        for name, tensor in prepare(images).items():
            whole = found.setdefault(name, tensor.new_empty((len(pictures), *tensor.shape[1:])))
            if tensor.shape[1:] != whole.shape[1:]:
                raise DataError(f"processor: {name} is {list(tensor.shape[1:])} for one image, and for others not")
            whole[done : done + len(tensor)] = tensor
        done += len(images)
    return found


def _opened(pictures: Sequence[Picture], mode: str) -> Iterator[list[Image.Image]]:
    for first in range(0, len(pictures), AT_ONCE):
        some = pictures[first : first + AT_ONCE]
        yield [_open(picture, first + place).convert(mode) for place, picture in enumerate(some)]


def _open(picture: Picture, row: int) -> Image.Image:
    """Return an image the way up that it was taken. Raises DataError."""
    where = str(picture) if isinstance(picture, Path) else f"the image in row {row}"
    try:
        # A picture too large to be one is refused, whatever is done about warnings elsewhere.
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(picture if isinstance(picture, Path) else BytesIO(picture), formats=FORMATS) as image,
        ):
            image.load()
            upright = ImageOps.exif_transpose(image)
    except UNREADABLE as fault:
        raise DataError(f"image: {where} cannot be read: {str(fault)[:200]}") from fault
    if upright.mode in DEEP_MODES:
        raise DataError(
            f"image: {where} has more than 8 bits a channel (mode {upright.mode}), which would be lost: "
            "scale it yourself, and save it with 8 bits or as kind `arrays`"
        )
    return upright


def _plainly(options: PixelOptions) -> Prepare:
    height, width = options.shape
    mean, std = (np.array(values, np.float32) for values in (options.mean, options.std))

    def prepare(images: list[Image.Image]) -> dict[str, Tensor]:
        sized = [image.resize((width, height), Image.Resampling.BICUBIC) for image in images]
        pixels = np.stack([np.asarray(image, np.float32).reshape(height, width, -1) for image in sized]) / 255
        # [n, h, w, c] -> [n, c, h, w]
        return {"pixel_values": torch.from_numpy(((pixels - mean) / std).transpose(0, 3, 1, 2))}

    return prepare


def _as_processor_says(source: str) -> Prepare:
    # The same one everywhere, also where torchvision is there, which resamples in its own way.
    processor: Any = load_pretrained("processor", source, AutoImageProcessor.from_pretrained, backend="pil")

    def prepare(images: list[Image.Image]) -> dict[str, Tensor]:
        try:
            made = processor(images=images, return_tensors="pt")
        except (ValueError, TypeError, RuntimeError) as fault:
            raise DataError(f"processor: {source} takes no such images: {str(fault)[:200]}") from fault
        return {name: tensor for name, tensor in made.items() if isinstance(tensor, Tensor)}

    return prepare
