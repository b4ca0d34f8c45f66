"""The verified images of a data set: each was read once and hashed, and a file says so to the next start."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tessera.shared.diagnostics import reason_of
from tessera.shared.model.dataset_schema import PIXELS
from tessera.worker.data.dataset import TableOnDisk
from tessera.worker.data.groups import group_name, is_unnamed
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.readers.image_processor import ByProcessor, PixelOptions, Preparation
from tessera.worker.data.readers.pictures import (
    AT_ONCE,
    GROUP,
    BrokenImage,
    Pictures,
    PixelReader,
    content_of,
    has_more_frames,
    inaccessible,
    opened,
    require_shape,
    require_undamaged,
)
from tessera.worker.errors import DataError
from tessera.worker.state.atomic_files import written_whole

MAX_IN_MEMORY = 1 << 30
"""Bytes of pixels that are kept in memory unless the settings say otherwise."""
THREADS = 8
"""Limit on the threads that verify images."""
SHOWN = 3
"""Number of unreadable images that a message describes."""
DIGEST_BYTES = 32
INDEX_FILE, INDEX_FORMAT = "images.npz", 5


@dataclass(frozen=True, eq=False)
class PixelInputs:
    """The inputs of the images that can be read."""

    tensors: Mapping[str, Tensor]
    on_disk: TableOnDisk | None
    digests: NDArray[np.uint8]
    """The SHA-256 of each image's file or bytes, [images, 32]."""
    places: NDArray[np.int64]
    """The place of each image among the pictures, int64 [images]."""
    unreadable: Sequence[str]
    """The fault of each image that is left out."""
    groups: Sequence[bytes]
    """A digest of the group in each image's DICOM header; empty without one."""
    partly_read: int
    """The number of images with pages or frames after the first, which are not read."""
    sides: NDArray[np.int32]
    """The longer side of each image in pixels, int32 [images]."""


@dataclass(eq=False)
class _Index:
    """The findings about each picture."""

    rows: NDArray[Any]
    """The key and the stamp of each picture; whether it is `known`, since it was read with this stamp; and only then
    the digests of its file and of the group in its DICOM header, zeros without one, its longer side in pixels, and
    whether it has more frames than the first."""
    inputs: dict[str, NDArray[Any]]
    """Inputs that stay in memory, with one row for each picture."""

    @classmethod
    def of(cls, pictures: Pictures, stamps: NDArray[np.int64], sample: Mapping[str, Tensor]) -> Self:
        """Return the index of unknown pictures. `sample` has the inputs to keep of an image."""
        count, keys, digest = len(pictures), pictures.keys, (np.uint8, DIGEST_BYTES)
        kinds = [("key", keys.dtype), ("stamp", np.int64, 2), ("known", "?"), ("digest", *digest), ("group", *digest)]
        rows = np.zeros(count, [*kinds, ("side", np.int32), ("more_frames", "?")])
        rows["key"], rows["stamp"] = keys, stamps
        # Filled in place, so that a large data set is not in memory twice.
        inputs = {name: one.new_zeros((count, *one.shape[1:])).numpy() for name, one in sample.items()}
        return cls(rows, inputs)

    def adopt(self, file: Path, terms: str) -> bool:
        """Copy the rows of unchanged pictures from the index in a file, if it was made on the same terms.

        Return True if it had every picture and no other. A file that is missing or damaged counts as empty.
        """
        try:
            with file.open("rb") as content, np.load(content, allow_pickle=False) as stored:
                known = stored["rows"]
                if str(stored["terms"]) != terms or not len(known):
                    return False
                order = np.argsort(known["key"], kind="stable")
                places = np.searchsorted(known["key"], self.rows["key"], sorter=order)
                chosen = order[np.minimum(places, len(order) - 1)]
                found = known[chosen]
                same = found["known"] & (found["key"] == self.rows["key"])
                same &= (found["stamp"] == self.rows["stamp"]).all(axis=1)
                for name, values in self.inputs.items():
                    values[same] = stored[_INPUT + name][chosen[same]]
                self.rows[same] = found[same]
                return bool(same.all()) and len(order) == len(self.rows)
        except (OSError, ValueError, LookupError, EOFError, BadZipFile):
            return False

    def save(self, file: Path, terms: str) -> None:
        """Write the index. Raises OSError."""
        inputs: dict[str, Any] = {_INPUT + name: values for name, values in self.inputs.items()}
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Names of files may identify patients.
        with written_whole(file, mode=0o600) as opened_file:
            np.savez(opened_file, terms=np.array(terms), rows=self.rows, **inputs)


_INPUT = "input "


def inputs_of(
    pictures: Pictures, options: PixelOptions, preparation: Preparation, prepared: PreparedFolder = NOT_KEPT
) -> PixelInputs:
    """Return `pixel_values` float32 [images, channels, height, width] and the processor's other inputs, those in
    memory and those on disk.

    Every image is read once, so that one that cannot be read is found now. If the pixels stay on disk, an index in
    `prepared` remembers the images that were read, and a later start reads only those that are new or have changed.
    Raises DataError for images that are not there, may not be read or are not of a kind that is read; if more are
    damaged than the options allow; or if the processor fails.
    """
    stamps = pictures.stamps()
    _require_files(pictures, stamps)
    one_shape = preparation.pixels_shape(options.mode) is not None
    image = _sample(pictures, options.mode, blank=one_shape)
    sample, raw = preparation([image]), preparation.prepare([image])[PIXELS]
    pixels = sample[PIXELS][0]
    size = pixels.nbytes * len(pictures)
    stays = size <= MAX_IN_MEMORY if options.in_memory is None else options.in_memory
    kept = {name: values for name, values in sample.items() if stays or name != PIXELS}
    index = _Index.of(pictures, stamps, kept)
    # If all images have one shape, and nothing of them stays in memory, it is enough that they can be opened.
    converts = bool(kept) or not one_shape
    shapes = {name: tuple(values.shape[1:]) for name, values in sample.items()}
    verification = _Verification(pictures, options.mode, preparation if converts else None, shapes, index)
    verification.run(NOT_KEPT if stays else prepared, _terms(pictures, options, preparation))
    unreadable = verification.reasons(options.max_unreadable)
    places = np.flatnonzero(index.rows["known"])
    chosen = index.rows[places]
    on_disk = None
    if not stays:
        reader = PixelReader(pictures, stamps, options.mode, preparation.prepare, tuple(raw.shape[1:]))
        finish = {PIXELS: preparation.finish} if preparation.finish else {}
        kinds = {PIXELS: (shapes[PIXELS], pixels.dtype)}
        on_disk = TableOnDisk(reader, torch.from_numpy(places), kinds, finish, in_loaders=True)
    kept_rows = places if unreadable else slice(None)
    tensors = {name: torch.from_numpy(values[kept_rows]) for name, values in index.inputs.items()}
    groups = [digest.tobytes() if digest.any() else b"" for digest in chosen["group"]] if pictures.dicom else ()
    # A copy, without the keys.
    digests = np.ascontiguousarray(chosen["digest"])
    return PixelInputs(
        tensors,
        on_disk,
        digests,
        places,
        unreadable,
        groups,
        int(chosen["more_frames"].sum()),
        np.ascontiguousarray(chosen["side"]),
    )


def _require_files(pictures: Pictures, stamps: NDArray[np.int64]) -> None:
    """Raise DataError if files are not there, before any is read."""
    absent = np.flatnonzero(~stamps.any(axis=1))
    reasons = []
    for place in absent[:SHOWN].tolist():
        try:
            Path(pictures.name(place)).stat()
        except (OSError, ValueError) as fault:
            reasons.append(str(inaccessible(pictures, place, fault)))
    if reasons:
        raise DataError(_together(reasons, len(absent), f"of {len(pictures)} images are not there"))


def _together(reasons: Sequence[str], count: int, what: str) -> str:
    """Return one message for several images, of which it describes the first."""
    if count == 1:
        return reasons[0]
    first = ". ".join(reason.removeprefix("image: ") for reason in reasons[:SHOWN])
    return f"image: {count} {what}. {first}{'. ...' * (count > SHOWN)}"


@dataclass
class _Verification:
    """The reading of every image that an index does not know."""

    pictures: Pictures
    mode: str
    preparation: Preparation | None
    """The conversion to inputs, some of which stay in memory; None if it is enough that an image can be opened."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape that each input of every image must have."""
    index: _Index
    unreadable: dict[int, DataError] = field(default_factory=dict)
    """The faults of the images that cannot be read, by place."""

    def run(self, prepared: PreparedFolder, terms: str) -> None:
        """Fill the index from the prepared one and from the images, and keep it. Raises DataError of a processor."""
        file = prepared.folder and prepared.folder / INDEX_FILE
        complete = file is not None and self.index.adopt(file, terms)
        unknown = np.flatnonzero(~self.index.rows["known"])
        pieces = [unknown[begin : begin + AT_ONCE].tolist() for begin in range(0, len(unknown), AT_ONCE)]
        # Opened images may be large, and those to convert are open together.
        threads = 1 if self.preparation else min(THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "indexing") as pool:
            for _ in pool.map(self._examine, pieces):
                pass
        if file and prepared.writable and not complete:
            try:
                self.index.save(file, terms)
            except OSError as fault:
                structlog.get_logger("worker").warning("index-not-written", file=str(file), reason=reason_of(fault))

    def _examine(self, places: Sequence[int]) -> None:
        images, read = [], []
        for place in places:
            try:
                image = opened(self.pictures, place, self.mode)
                content = content_of(self.pictures, place)
                require_undamaged(content, self.pictures.name(place))
            except DataError as fault:
                self.unreadable[place] = fault
                continue
            row = self.index.rows[place]
            if not is_unnamed(group := group_name(image.info.get(GROUP, ""))):
                row["group"] = np.frombuffer(hashlib.sha256(group).digest(), np.uint8)
            row["digest"] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
            row["known"], row["side"], row["more_frames"] = True, max(image.size), has_more_frames(content)
            if self.preparation:
                images.append(image)
                read.append(place)
        for name, values in self.preparation(images).items() if self.preparation and images else ():
            require_shape(name, values, self.shapes.get(name, ()))
            if name in self.index.inputs:
                self.index.inputs[name][read] = values.numpy()

    def reasons(self, share: float) -> Sequence[str]:
        """Return the fault of each damaged image. Raises DataError if they are more than a share, or if others
        cannot be read."""
        count, faults = len(self.pictures), [self.unreadable[place] for place in sorted(self.unreadable)]
        if others := [str(fault) for fault in faults if not isinstance(fault, BrokenImage)]:
            raise DataError(_together(others, len(others), f"of {count} images cannot be read, and are not damaged"))
        reasons = list(map(str, faults))
        if len(reasons) > int(share * count):
            what = f"of {count} images cannot be read, more than max_unreadable = {share:g} allows"
            raise DataError(_together(reasons, len(reasons), what))
        return reasons


def _sample(pictures: Pictures, mode: str, *, blank: bool) -> Image.Image:
    """Return a blank image, or the first one that can be read. Raises DataError if there is none."""
    if blank:
        return Image.new(mode, (60, 90))
    for place in range(len(pictures) - 1):
        try:
            return opened(pictures, place, mode)
        except DataError:
            continue
    return opened(pictures, len(pictures) - 1, mode)


def _terms(pictures: Pictures, options: PixelOptions, preparation: Preparation) -> str:
    """Return everything on which the index depends besides the pictures."""
    prepare = preparation.prepare
    processor = prepare.processor.to_json_string() if isinstance(prepare, ByProcessor) else None
    headers = getattr(pictures.dicom, "keywords", None)
    return json.dumps([INDEX_FORMAT, pictures.source, options.size, options.channels, headers, processor])
