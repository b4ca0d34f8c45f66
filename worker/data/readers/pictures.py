"""The images of a data set, and the reading of their pixels. Loaders import this module: it must stay light."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from tessera.shared.diagnostics import reason_of
from tessera.shared.model.dataset_schema import PIXELS
from tessera.worker.data.dataset import DataError

AT_ONCE = 16
"""Number of images to convert together. Until then each is in memory in its full size, 36 MB for a photo."""

Picture = Path | bytes
"""The path of an image's file, or its bytes."""

# Common formats of scanners, cameras and browsers. Pillow reads more, some of them by starting other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif"})
DICOM = frozenset({".dcm", ".dicom"})
GROUP = "group"
"""The key of the group that a DICOM file's header names, in its image's `info`."""
DICOM_MARK = slice(128, 132)
"""The place of the letters DICM in a DICOM file."""

# Modes whose conversion to eight bits per channel would clip values rather than scale them.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

# Pillow's errors for files that are not what they seem to be.
BOMBS = (Image.DecompressionBombWarning, Image.DecompressionBombError)
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, *BOMBS)

Stamp = tuple[int, int]
"""A file's size in bytes, and when it was changed, in nanoseconds."""

DicomReader = Callable[[Picture, str], Image.Image]
"""A function from a DICOM file and its name for people to its image. Raises DataError."""

Prepare = Callable[[list[Image.Image]], dict[str, Tensor]]
"""A function from opened images to a model's inputs, [images, ...] each."""


class Pictures(Protocol):
    """Images by place. They are arrays rather than lists, of which every loader would make a copy of its own."""

    @property
    def source(self) -> str:
        """The folder or the files that contain the images."""

    @property
    def dicom(self) -> DicomReader | None:
        """The reader of DICOM files, or None if they are not read."""

    @property
    def keys(self) -> NDArray[Any]:
        """The name of each image within the source, [images]."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Picture:
        """Return an image's path or bytes. Raises DataError."""

    def name(self, place: int) -> str:
        """Return the name of an image for people."""

    def stamp(self, place: int) -> Stamp:
        """Return the stamp of the file that contains an image, or zeros if it is not there."""

    def stamps(self) -> NDArray[np.int64]:
        """Return the stamp of each image, int64 [images, 2]."""


@dataclass(frozen=True, eq=False)
class PictureFiles:
    """Images in files of their own: `keys`, bytes [images], are paths from the folder `source`."""

    source: str
    keys: NDArray[np.bytes_]
    dicom: DicomReader | None = None

    @classmethod
    def of(cls, folder: Path, names: Iterable[str], dicom: DicomReader | None = None) -> Self:
        return cls(str(folder), np.array([os.fsencode(name) for name in names], np.bytes_), dicom)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, place: int) -> Path:
        return Path(self.source, os.fsdecode(self.keys[place]))

    def name(self, place: int) -> str:
        return str(self[place])

    def stamp(self, place: int) -> Stamp:
        return stamp_of(self[place])

    def stamps(self) -> NDArray[np.int64]:
        folder = os.fsencode(self.source)
        # Without an object for each path: there may be millions.
        found = [stamp_of(os.path.join(folder, key)) for key in self.keys.tolist()]  # noqa: PTH118
        return np.array(found, np.int64).reshape(-1, 2)


def stamp_of(path: bytes | Path) -> Stamp:
    """Return the stamp of a file, or zeros if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  (paths in bytes, without an object for each)
    except (OSError, ValueError):
        return 0, 0
    return found.st_size, found.st_mtime_ns


def is_dicom(picture: Picture) -> bool:
    """Return whether an image is a DICOM file: by its suffix, or by its content if that is no image's suffix."""
    if isinstance(picture, bytes):
        return picture[DICOM_MARK] == b"DICM"
    suffix = picture.suffix.lower()
    if suffix in DICOM or suffix in SUFFIXES:
        return suffix in DICOM
    try:
        with picture.open("rb") as file:
            return file.read(DICOM_MARK.stop)[DICOM_MARK] == b"DICM"
    except (OSError, ValueError):
        return False


def opened(pictures: Pictures, place: int, mode: str) -> Image.Image:
    """Return an image in its EXIF orientation, converted to `mode`. Raises DataError."""
    picture = pictures[place]
    if pictures.dicom and is_dicom(picture):
        return pictures.dicom(picture, pictures.name(place)).convert(mode)
    try:
        with Image.open(picture if isinstance(picture, Path) else BytesIO(picture), formats=FORMATS) as image:
            # Pillow only warns of an implausibly large image, unless it is twice as large again.
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or float("inf")):
                raise Image.DecompressionBombError(f"{image.width} x {image.height} could be a decompression bomb")
            image.load()
            upright = ImageOps.exif_transpose(image)
            # A deep one is refused below.
            converted = upright if upright.mode in DEEP_MODES else upright.convert(mode)
    except UNREADABLE as fault:
        remedy = "set dicom = true to read DICOM files" if is_dicom(picture) else "replace it or take it out"
        unknown = isinstance(fault, UnidentifiedImageError) and f"it is none of {', '.join(FORMATS)}"
        reason = unknown or reason_of(fault)[:200]
        raise DataError(f"image: {pictures.name(place)} cannot be read: {reason}; {remedy}") from fault
    if upright.mode in DEEP_MODES:
        raise DataError(
            f"image: {pictures.name(place)} has more than 8 bits per channel (mode {upright.mode}), which would be "
            "clipped: scale it, and save it with 8 bits or as kind `arrays`"
        )
    return converted


@dataclass(frozen=True)
class Resized:
    """Conversion of images to bytes, uint8 [images, height, width, channels], stretched to one size."""

    height: int
    width: int

    def __call__(self, images: list[Image.Image]) -> dict[str, Tensor]:
        sized = [image.resize((self.width, self.height), Image.Resampling.BICUBIC) for image in images]
        arrays = [np.asarray(image, np.uint8).reshape(self.height, self.width, -1) for image in sized]
        return {PIXELS: torch.from_numpy(np.stack(arrays))}


@dataclass(frozen=True, eq=False)
class PixelReader:
    """Reads the pixels of the images at some places, as `prepare` makes them. Raises DataError, also for a file that
    was changed since its stamp, int64 [images, 2], was taken."""

    pictures: Pictures
    stamps: NDArray[np.int64]
    mode: str
    prepare: Prepare
    row: tuple[int, ...]
    """The shape of one image's pixels."""

    def __call__(self, places: Sequence[int]) -> Tensor:
        parts = [self._read(places[first : first + AT_ONCE]) for first in range(0, len(places), AT_ONCE)]
        return torch.cat(parts)

    def _read(self, places: Sequence[int]) -> Tensor:
        images = []
        for place in places:
            images.append(opened(self.pictures, place, self.mode))
            if self.pictures.stamp(place) != tuple(self.stamps[place]):
                raise DataError(
                    f"image: {self.pictures.name(place)} has changed since the worker started; restart it"
                )
        pixels = self.prepare(images)[PIXELS]
        require_shape(PIXELS, pixels, self.row)
        return pixels


def require_shape(name: str, tensor: Tensor, row: Sequence[int]) -> None:
    """Raise DataError if a processor's result, [images, ...], is not of the shape of another image's."""
    if tuple(tensor.shape[1:]) != tuple(row):
        raise DataError(
            f"processor: {name} is {list(tensor.shape[1:])} for one image and {list(row)} for another: use a "
            "processor with a fixed size"
        )
