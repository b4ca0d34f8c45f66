"""Conversion of images to a model's `pixel_values`, by an image processor of transformers or by simple options."""

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from transformers import AutoImageProcessor

from tessera.shared.model.dataset_schema import PIXELS
from tessera.worker.data.dataset import Options, Shape
from tessera.worker.data.normalization import PixelNormalization
from tessera.worker.data.readers.pictures import Prepare, Resizing
from tessera.worker.data.readers.pretrained import load_pretrained
from tessera.worker.errors import DataError

MAX_SIDE = 1 << 14
PROBED = ((60, 90), (110, 70), (5, 4))
"""Sizes of images by which two ways of preparing them are compared: a crop of the last has a margin."""


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
    dicom: bool = Field(default=False, description="read DICOM files too, by their suffix or their content")
    window: tuple[float, PositiveFloat] | None = Field(
        default=None, description="centre and width of the DICOM values to show; the file's own window if unset"
    )
    max_unreadable: float = Field(
        default=0.0, ge=0, lt=1, description="share of the images that may be damaged, and are then left out"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.processor is None) == (self.size is None):
            raise ValueError("give either processor or size")
        if self.processor is not None and self.model_fields_set & {"mean", "std"}:
            raise ValueError("mean and std are set by the processor: leave them out")
        if self.window and not self.dicom:
            raise ValueError("window: is for DICOM files: set dicom = true")
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


@dataclass(frozen=True)
class Preparation:
    """The conversion of opened images to a model's inputs."""

    prepare: Prepare
    finish: PixelNormalization | None = None
    """The rest of the conversion of `pixel_values`, done on the device; None if there is none."""

    def __call__(self, images: list[Image.Image]) -> dict[str, Tensor]:
        """Return the inputs, [images, ...] each. Raises DataError."""
        inputs = self.prepare(images)
        return inputs if self.finish is None else {**inputs, PIXELS: self.finish(inputs[PIXELS])}

    def pixels_shape(self, mode: str) -> Shape:
        """Return the shape of `pixel_values` for one image, or None if it depends on the image's size."""
        try:
            blank = [self([Image.new(mode, size)])[PIXELS].shape[1:] for size in PROBED[:2]]
        except (DataError, KeyError):
            return None
        return tuple(blank[0]) if blank[0] == blank[1] else None

    def normalization(self, mode: str) -> PixelNormalization | None:
        """Return the conversion of bytes to `pixel_values`, as images of one grey show it; None if it is not affine,
        or if `pixel_values` are not images."""
        if self.finish:
            return self.finish

        def shown(level: int) -> Tensor:
            pixels = self([Image.new(mode, (64, 64), (level,) * len(mode))])[PIXELS][0]  # [channels, height, width]
            return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].double()

        try:
            black, grey, white = map(shown, (0, 102, 255))
        except (DataError, KeyError, IndexError):
            return None
        span = white - black
        if not bool((span > 0).all()) or not torch.allclose(grey, black + 0.4 * span, rtol=0, atol=1e-3):
            return None
        return PixelNormalization(tuple((-black / span).tolist()), tuple((1 / span).tolist()))


def preparation(options: PixelOptions) -> Preparation:
    """Return the conversion that the options describe. Raises DataError."""
    if options.processor is not None:
        processor = load_processor("processor", options.processor)
        whole = Preparation(ByProcessor(options.processor, processor))
        return _in_bytes(options.processor, processor, options.mode, whole) or whole
    return Preparation(Resizing(*options.shape), PixelNormalization(options.mean, options.std))


def load_processor(option: str, source: str) -> Any:
    """Return the image processor of a local folder, or of a name on the hub. Raises DataError."""
    # The same backend at every site, even where torchvision is installed, which resamples differently.
    return load_pretrained(option, source, AutoImageProcessor.from_pretrained, backend="pil")


@dataclass(frozen=True)
class ByProcessor:
    """Conversion of images by a processor of transformers."""

    source: str
    processor: Any

    def __call__(self, images: list[Image.Image]) -> dict[str, Tensor]:
        return self._made(images)

    def _made(self, images: list[Image.Image], **settings: bool) -> dict[str, Tensor]:
        try:
            prepared = self.processor(images=images, return_tensors="pt", **settings)
        except (ValueError, TypeError, RuntimeError) as fault:
            raise DataError(f"processor: {self.source} cannot process the images: {str(fault)[:200]}") from fault
        return {name: tensor for name, tensor in prepared.items() if isinstance(tensor, Tensor)}


@dataclass(frozen=True)
class BytesByProcessor(ByProcessor):
    """The same up to the bytes of pixels, uint8 [images, height, width, channels]."""

    def __call__(self, images: list[Image.Image]) -> dict[str, Tensor]:
        inputs = self._made(images, do_rescale=False, do_normalize=False)
        return {**inputs, PIXELS: inputs[PIXELS].permute(0, 2, 3, 1).contiguous()}


def _in_bytes(source: str, processor: Any, mode: str, whole: Preparation) -> Preparation | None:
    """Return a preparation that leaves the arithmetic to the device, if it gives the bits of `whole`."""
    try:
        given = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
        mean, std = (tuple(map(float, np.atleast_1d(each))) for each in given)
        made = Preparation(
            BytesByProcessor(source, processor), PixelNormalization(mean, std, float(processor.rescale_factor))
        )
        for width, height in PROBED:
            noise = Random(0).randbytes(width * height * len(mode))  # noqa: S311  (any pixels)
            image = Image.frombytes(mode, (width, height), noise)
            expected, found = whole([image]), made([image])
            if made.prepare([image])[PIXELS].dtype != torch.uint8 or expected.keys() != found.keys():
                return None
            if not all(torch.equal(expected[name], found[name]) for name in expected):
                return None
    except (DataError, AttributeError, TypeError, ValueError, RuntimeError, LookupError):
        return None
    return made
