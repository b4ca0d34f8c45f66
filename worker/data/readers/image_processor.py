"""Conversion of images to a model's `pixel_values`, by an image processor of transformers or by simple options."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from transformers import AutoImageProcessor

from tessera.shared.diagnostics import reason_of
from tessera.worker.data.dataset import DataError, Options, RowsOnDisk, Shape
from tessera.worker.data.readers.pretrained import load_pretrained

Picture = Path | bytes
"""The path of an image's file, or its bytes."""

# Common formats of scanners, cameras and browsers. Pillow reads more, some of them by starting other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif"})
DICOM = frozenset({".dcm", ".dicom"})

# Modes whose conversion to eight bits per channel would clip values rather than scale them.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

# Pillow's errors for files that are not what they seem to be.
BOMBS = (Image.DecompressionBombWarning, Image.DecompressionBombError)
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, *BOMBS)

MAX_SIDE = 1 << 14
AT_ONCE = 16
"""Number of images to open and prepare together."""
MAX_IN_MEMORY = 1 << 30
"""Bytes of pixels that are kept in memory unless the settings say otherwise."""
PIXELS = "pixel_values"

Prepare = Callable[[list[Image.Image]], dict[str, Tensor]]
"""A function from opened images to a model's inputs, [images, ...] each."""


class PixelOptions(Options):
    """The conversion of images to numbers: by `processor`, or else by the other options."""

    processor: str | None = Field(
        default=None, description="an image processor: a local folder, or a name on the hub"
    )
    size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="pixels on each side, or height and width; images are stretched to this size"
    )
    channels: Literal[1, 3] = Field(default=3, description="1: greyscale, 3: colour; images are converted first")
    mean: tuple[float, ...] = Field(
        default=(0.5,), description="subtracted from values in 0 to 1, for all channels or for each"
    )
    std: tuple[PositiveFloat, ...] = Field(default=(0.5,), description="divisor after the subtraction")

    in_memory: bool | None = Field(
        default=None, description="keep all pixels in memory; if unset, up to 1 GiB of them; more are read per batch"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.processor is None) == (self.size is None):
            raise ValueError("give either processor or size")
        if self.processor is not None and self.model_fields_set & {"mean", "std"}:
            raise ValueError("mean and std are set by the processor: leave them out")
        if any(side > MAX_SIDE for side in self.shape):
            raise ValueError(f"size: at most {MAX_SIDE} pixels a side")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ValueError(f"{name}: give one value, or one for each of {self.channels} channels")
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels, or (0, 0) if the processor sets them."""
        return (self.size, self.size) if isinstance(self.size, int) else (self.size or (0, 0))

    @property
    def mode(self) -> str:
        """Pillow's name for the channels."""
        return "L" if self.channels == 1 else "RGB"


def preparation(options: PixelOptions) -> Prepare:
    """Return the conversion that the options describe. Raises DataError."""
    return _by_options(options) if options.processor is None else _by_processor(options.processor)


def fixed_shape(options: PixelOptions, prepare: Prepare) -> Shape:
    """Return the shape of `pixel_values` for one image, or None if it depends on the image's size."""
    try:
        blank = [prepare([Image.new(options.mode, size)])[PIXELS].shape[1:] for size in ((60, 90), (110, 70))]
    except (DataError, KeyError):
        return None
    return tuple(blank[0]) if blank[0] == blank[1] else None


def inputs_of(
    pictures: Sequence[Picture], options: PixelOptions, prepare: Prepare
) -> tuple[dict[str, Tensor], dict[str, RowsOnDisk]]:
    """Return `pixel_values` float32 [pictures, channels, height, width] and the processor's other inputs, those in
    memory and those on disk. Every image is read once, so that one that cannot be read is found now.

    Raises DataError if an image cannot be read or the processor fails.
    """
    stamps = [_stamp(picture) for picture in pictures]
    inputs: dict[str, Tensor] = {}
    on_disk: dict[str, RowsOnDisk] = {}
    # Tensors are filled in place, so that a large data set is not in memory twice.
    for done in range(0, len(pictures), AT_ONCE):
        places = range(done, min(done + AT_ONCE, len(pictures)))
        for name, tensor in prepare([_open(pictures[row], row).convert(options.mode) for row in places]).items():
            if name not in inputs and name not in on_disk:
                row, size = tuple(tensor.shape[1:]), tensor[0].nbytes * len(pictures)
                keep = size <= MAX_IN_MEMORY if options.in_memory is None else options.in_memory
                if keep or name != PIXELS:
                    inputs[name] = tensor.new_empty((len(pictures), *row))
                else:
                    read = partial(_read, pictures, stamps, options, prepare, row)
                    on_disk[name] = RowsOnDisk(read, torch.arange(len(pictures)), row, tensor.dtype)
            _require_shape(name, tensor, (on_disk[name] if name in on_disk else inputs[name]).shape[1:])
            if name in inputs:
                inputs[name][done : done + len(tensor)] = tensor
    return inputs, on_disk


def _read(
    pictures: Sequence[Picture],
    stamps: Sequence[int],
    options: PixelOptions,
    prepare: Prepare,
    row: tuple[int, ...],
    places: Sequence[int],
) -> Tensor:
    """Return the pixels of the images at these places. Raises DataError, also for a file that was changed."""
    opened = []
    for place in places:
        opened.append(_open(pictures[place], place).convert(options.mode))
        if _stamp(pictures[place]) != stamps[place]:
            raise DataError(f"image: {pictures[place]!s} has changed since the worker started; restart it")
    pixels = prepare(opened)[PIXELS]
    _require_shape(PIXELS, pixels, row)
    return pixels


def _stamp(picture: Picture) -> int:
    """Return when a file was changed, or 0 for bytes and for a file that is not there, which `_open` names."""
    try:
        return picture.stat().st_mtime_ns if isinstance(picture, Path) else 0
    except OSError:
        return 0


def _require_shape(name: str, tensor: Tensor, row: Sequence[int]) -> None:
    if tuple(tensor.shape[1:]) != tuple(row):
        raise DataError(
            f"processor: {name} is {list(tensor.shape[1:])} for one image and {list(row)} for another: use a "
            "processor with a fixed size"
        )


def _open(picture: Picture, row: int) -> Image.Image:
    """Return an image in its EXIF orientation. Raises DataError."""
    where = str(picture) if isinstance(picture, Path) else f"the image in row {row}"
    try:
        # An implausibly large image is refused, regardless of the warning filters elsewhere.
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(picture if isinstance(picture, Path) else BytesIO(picture), formats=FORMATS) as image,
        ):
            image.load()
            upright = ImageOps.exif_transpose(image)
    except UNREADABLE as fault:
        dicom = isinstance(picture, Path) and picture.suffix.lower() in DICOM
        remedy = "convert DICOM files to PNG first" if dicom else "replace it or take it out"
        unknown = isinstance(fault, UnidentifiedImageError) and f"it is none of {', '.join(FORMATS)}"
        reason = unknown or reason_of(fault)[:200]
        raise DataError(f"image: {where} cannot be read: {reason}; {remedy}") from fault
    if upright.mode in DEEP_MODES:
        raise DataError(
            f"image: {where} has more than 8 bits per channel (mode {upright.mode}), which would be clipped: "
            "scale it, and save it with 8 bits or as kind `arrays`"
        )
    return upright


def _by_options(options: PixelOptions) -> Prepare:
    height, width = options.shape
    mean, std = (np.array(values, np.float32) for values in (options.mean, options.std))

    def prepare(images: list[Image.Image]) -> dict[str, Tensor]:
        sized = [image.resize((width, height), Image.Resampling.BICUBIC) for image in images]
        pixels = np.stack([np.asarray(image, np.float32).reshape(height, width, -1) for image in sized]) / 255
        # [n, h, w, c] -> [n, c, h, w]
        return {PIXELS: torch.from_numpy(((pixels - mean) / std).transpose(0, 3, 1, 2))}

    return prepare


def load_processor(option: str, source: str) -> Any:
    """Return the image processor of a local folder, or of a name on the hub. Raises DataError."""
    # The same backend at every site, even where torchvision is installed, which resamples differently.
    return load_pretrained(option, source, AutoImageProcessor.from_pretrained, backend="pil")


def _by_processor(source: str) -> Prepare:
    processor = load_processor("processor", source)

    def prepare(images: list[Image.Image]) -> dict[str, Tensor]:
        try:
            prepared = processor(images=images, return_tensors="pt")
        except (ValueError, TypeError, RuntimeError) as fault:
            raise DataError(f"processor: {source} cannot process the images: {str(fault)[:200]}") from fault
        return {name: tensor for name, tensor in prepared.items() if isinstance(tensor, Tensor)}

    return prepare
