"""The images of a data set, and the reading of their pixels. Loaders import this module: it must stay light."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor

from tessera.shared.diagnostics import reason_of
from tessera.shared.model.dataset_schema import PIXELS
from tessera.worker.data.cells import ByteCells
from tessera.worker.data.readers.absent_files import in_its_form, near_file
from tessera.worker.errors import DataError

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
LFS_POINTER = b"version https://git-lfs"
"""The beginning of the file that Git leaves in place of a large one that was not fetched."""

# Modes whose conversion to eight bits per channel would clip values rather than scale them.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

# Pillow's errors for images of implausible size.
BOMBS = (Image.DecompressionBombWarning, Image.DecompressionBombError)
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, *BOMBS)

GARBAGE = b"".join(b"\x5a" * 32 + bytes((0xFF, 0xD0 + restart)) for restart in range(8)) * 4
"""Bytes that a decoder of JPEG takes for the rest of an image whose end is missing, with a marker of each restart."""
START_OF_JPEG, END_OF_JPEG = b"\xff\xd8\xff", b"\xff\xd9"


class BrokenImage(DataError):
    """An image whose file is damaged, which `max_unreadable` may leave out. No other cause lies in the image."""


Stamp = tuple[int, int]
"""A file's size in bytes, and when it was changed, in nanoseconds."""

DicomReader = Callable[[Picture, str], Image.Image]
"""A function from a DICOM file and its name for people to its image. Raises DataError."""

Prepare = Callable[[list[Image.Image]], dict[str, Tensor]]
"""A function from opened images to a model's inputs, [images, ...] each."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images by place, in files of their own or in the cells of a table. They are arrays rather than lists, of which
    every loader would make a copy of its own."""

    folder: Path
    paths: NDArray[np.bytes_]
    """The path of each image, from the folder; empty for an image in a cell."""
    dicom: DicomReader | None = None
    """The reader of DICOM files, or None if they are not read."""
    cells: ByteCells | None = None
    where: str = ""
    """The table of the cells, for people."""

    @classmethod
    def of(cls, folder: Path, names: Iterable[str], dicom: DicomReader | None = None) -> Self:
        """Return the images in these files, whose paths begin at the folder."""
        return cls(folder, _encoded(names), dicom)

    @classmethod
    def in_cells(cls, folder: Path, cells: ByteCells, where: str, dicom: DicomReader | None = None) -> Self:
        """Return the images in the cells of a table, of which some may be paths instead. Raises DataError."""
        count = int(cells.begins[-1])
        if cells.all_bytes:
            return cls(folder, np.zeros(count, "S1"), dicom, cells, where)
        # One by one, since each may be large.
        written = (path_in(cells.read(np.array([row]))[0]) for row in range(count))
        return cls(folder, _encoded(in_its_form(folder, path or "") for path in written), dicom, cells, where)

    @property
    def source(self) -> str:
        """The folder or the column that contains the images, and the paths in the column."""
        if self.cells is None:
            return str(self.folder)
        paths = hashlib.sha256(self.paths.tobytes()).hexdigest()
        return "\n".join([*map(str, self.cells.files), self.cells.column, paths])

    @property
    def keys(self) -> NDArray[Any]:
        """The name of each image within the source, [images]."""
        return np.arange(len(self)) if self.cells else self.paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Picture:
        """Return an image's path or bytes. Raises DataError."""
        if path := self._path(place):
            return path
        cell = self.cells.read(np.array([place]))[0] if self.cells else None
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if isinstance(content, bytes) and content:
            return content
        raise BrokenImage(f"image: row {place} of {self.where} has neither a path nor an image's bytes")

    def _path(self, place: int) -> Path | None:
        return self.folder / os.fsdecode(self.paths[place]) if self.paths[place] else None

    def name(self, place: int) -> str:
        """Return the name of an image for people: its path, if it has one."""
        return str(self._path(place) or f"the image in row {place} of {self.where}")

    def stamp(self, place: int) -> Stamp:
        """Return the stamp of the file that contains an image, or zeros if it is not there."""
        return stamp_of(self._path(place) or (self.cells.file_of(place) if self.cells else self.folder))

    def stamps(self) -> NDArray[np.int64]:
        """Return the stamp of each image, int64 [images, 2]."""
        folder, found = os.fsencode(self.folder), np.zeros((len(self), 2), np.int64)
        if self.cells:
            found[:] = np.repeat([*map(stamp_of, self.cells.files)], np.diff(self.cells.begins), axis=0)
        # Without an object for each path: there may be millions.
        for place in np.flatnonzero(self.paths).tolist():
            found[place] = stamp_of(os.path.join(folder, self.paths[place]))  # noqa: PTH118
        return found


def _encoded(paths: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([os.fsencode(path) for path in paths], np.bytes_)


def path_in(cell: object) -> str | None:
    """Return a cell's path, or that in a record without bytes."""
    path = cell.get("path") if isinstance(cell, dict) and not cell.get("bytes") else cell
    return path if isinstance(path, str) else None


def stamp_of(path: bytes | Path) -> Stamp:
    """Return the stamp of a file, or zeros if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  (paths in bytes, without an object for each)
    except (OSError, ValueError):
        return 0, 0
    return found.st_size, found.st_mtime_ns


def is_dicom(picture: Picture) -> bool:
    """Return True if an image is a DICOM file: by its suffix, or by its content if no image has such a suffix."""
    if isinstance(picture, bytes):
        return holds_dicom(picture)
    suffix = picture.suffix.lower()
    if suffix in DICOM or suffix in SUFFIXES:
        return suffix in DICOM
    try:
        with picture.open("rb") as file:
            return holds_dicom(file.read(DICOM_MARK.stop))
    except (OSError, ValueError):
        return False


def holds_dicom(content: bytes) -> bool:
    """Return True if bytes begin as a DICOM file does: with a preamble and DICM, or without them with an element of
    group 2 or 8 (PS3.10, 7.1; PS3.5, 7.1)."""
    if content[DICOM_MARK] == b"DICM":
        return True
    group, element, rest = content[:2], content[2:4], content[4:8]
    # Then follow two capital letters, or a length of four bytes, which is small.
    return group in (b"\2\0", b"\x08\0") and element[1:] == b"\0" and (rest[:2].isupper() or rest[1:] == b"\0\0\0")


def content_of(pictures: Pictures, place: int) -> bytes:
    """Return the bytes of an image. Raises DataError."""
    picture = pictures[place]
    try:
        return picture if isinstance(picture, bytes) else picture.read_bytes()
    except (OSError, ValueError) as fault:
        raise inaccessible(pictures, place, fault) from fault


def inaccessible(pictures: Pictures, place: int, fault: OSError | ValueError) -> DataError:
    """Return the error for an image whose file cannot be opened, with the remedy for the cause."""
    path, written = Path(pictures.name(place)), os.fsdecode(pictures.paths[place])
    reason, number = reason_of(fault), fault.errno if isinstance(fault, OSError) else None
    if number in (errno.EACCES, errno.EPERM):
        remedy = "let the worker's user read the file and search the folders above it"
    elif number == errno.EISDIR:
        remedy = "name the image in it"
    elif number not in (None, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        remedy = "check the disk or the file server, and try again"
    elif path.is_symlink():
        remedy = f"it is a link to {path.readlink()}, where no file is: restore that file, or remove the link"
    elif near := near_file(pictures.folder, written, SUFFIXES | DICOM):
        remedy = f"the name {near[1]}: write it as in {str(near[0])!r}"
    else:
        remedy = f"restore the file, or correct its path, which begins at {pictures.folder}"
    return DataError(f"image: {path} cannot be read: {reason}; {remedy}")


def opened(pictures: Pictures, place: int, mode: str) -> Image.Image:
    """Return an image in its EXIF orientation, composited on white and converted to `mode`. Raises DataError."""
    picture, name = pictures[place], pictures.name(place)
    if pictures.dicom and is_dicom(picture):
        return pictures.dicom(content_of(pictures, place), name).convert(mode)
    try:
        with Image.open(picture if isinstance(picture, Path) else BytesIO(picture), formats=FORMATS) as image:
            # Pillow only warns of an implausibly large image, unless it is twice as large again.
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or float("inf")):
                raise Image.DecompressionBombError(f"{image.width} x {image.height} could be a decompression bomb")
            image.load()
            upright = ImageOps.exif_transpose(image)
    except BOMBS as fault:
        raise DataError(f"image: {name} cannot be read: {fault}; scale it down, or take it out") from fault
    except UNREADABLE as fault:
        if isinstance(fault, OSError) and fault.errno:
            raise inaccessible(pictures, place, fault) from fault
        raise _undecodable(name, picture, fault) from fault
    if upright.mode in DEEP_MODES:
        raise DataError(
            f"image: {name} has more than 8 bits per channel (mode {upright.mode}), which would be clipped: scale "
            "it, and save it with 8 bits or as kind `arrays`"
        )
    try:
        return _on_white(upright).convert(mode)
    except ValueError as fault:
        raise DataError(f"image: {name} cannot be read: {fault}; save it in RGB, or in grey") from fault


def _undecodable(name: str, picture: Picture, fault: Exception) -> DataError:
    """Return the error for an image that Pillow cannot decode."""
    if is_dicom(picture):
        return DataError(f"image: {name} is a DICOM file: set dicom = true to read DICOM files")
    with BytesIO(picture) if isinstance(picture, bytes) else picture.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return DataError(
                f"image: {name} is a pointer of Git LFS in place of the image: fetch it by `git lfs pull`"
            )
    unknown = isinstance(fault, UnidentifiedImageError) and f"it is none of {', '.join(FORMATS)}"
    return BrokenImage(f"image: {name} cannot be read: {unknown or str(fault)[:200]}; replace it or take it out")


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image as it looks on white: under transparent pixels lie colours that no viewer shows."""
    if not image.has_transparency_data:
        return image
    shown = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)


def require_undamaged(content: bytes, name: str) -> None:
    """Raise BrokenImage for damage that Pillow repairs in silence: a wrong checksum in a PNG file, or a JPEG file
    whose end is missing."""
    try:
        if content.startswith(b"\x89PNG"):
            PngImageFile(BytesIO(content)).verify()
        elif content.startswith(START_OF_JPEG) and not _has_end(content):
            raise EOFError("its end is missing")
    except UNREADABLE as fault:
        raise BrokenImage(f"image: {name} cannot be read: {fault}; replace it or take it out") from fault


def has_more_frames(content: bytes) -> bool:
    """Return True if a file has pages or frames after the first, which are not read.

    The previews in photos of the format MPO, which extends JPEG, do not count.
    """
    if content.startswith(START_OF_JPEG):
        return False
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            return bool(getattr(image, "is_animated", False))
    except UNREADABLE:
        return False


def _has_end(jpeg: bytes) -> bool:
    """Return True if a JPEG file contains the whole image.

    A decoder paints a missing part grey. If the image is whole, bytes inserted at its end change no pixel.
    """
    begin, pixels = _small(jpeg)
    end = jpeg.find(END_OF_JPEG, begin)
    return end >= 0 and np.array_equal(pixels, _small(jpeg[:end] + GARBAGE + jpeg[end:])[1])


def _small(jpeg: bytes) -> tuple[int, NDArray[np.uint8]]:
    """Return the place where the image's data begin, and its pixels.

    They are at an eighth of its size, which is faster, unless scans after the first one refine them.
    """
    with JpegImageFile(BytesIO(jpeg)) as image:
        begin = image.fp.tell() if image.fp else 0
        if not image.info.get("progressive"):
            image.draft(None, (-(-image.width // 8), -(-image.height // 8)))
        return begin, np.asarray(image)


@dataclass(frozen=True)
class Resizing:
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

    def __call__(self, places: Sequence[int]) -> dict[str, Tensor]:
        parts = [self._read(places[first : first + AT_ONCE]) for first in range(0, len(places), AT_ONCE)]
        return {PIXELS: torch.cat(parts)}

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
