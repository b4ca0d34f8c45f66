"""Images for classification: a folder with a folder for each class, or a table of paths or image bytes.

[datasets.scans]
kind = "images"
folder = "/data/scans"
labels = ["benign", "malignant"]
processor = "/models/vit"
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tessera.shared.model.dataset_schema import PIXELS
from tessera.shared.near_names import absent
from tessera.worker.data.dataset import LABELS, Adapter, DataError, Dataset, LoadReport, counted, schema_of
from tessera.worker.data.readers.class_labels import Absent, Names, numbered
from tessera.worker.data.readers.image_processor import (
    DICOM,
    SUFFIXES,
    Picture,
    PixelOptions,
    fixed_shape,
    inputs_of,
    preparation,
)
from tessera.worker.data.readers.table_files import is_saved
from tessera.worker.data.readers.tables import Files, numbered_domains, read_table


class ImagesOptions(PixelOptions):
    folder: Path | None = Field(default=None, description="contains a folder of images for each class")
    domain_folders: bool = Field(default=False, description="`folder` contains such a folder for each domain")
    file: Files | None = Field(
        default=None, description="a table with a row for each image, in any form that `text` reads"
    )
    split: str | None = Field(default=None, description="the split, if `file` is a folder with several")
    image: str = Field(default="image", description="column: the image's path, from the table's folder, or its bytes")
    label: str = Field(default="label", description="column: the class")
    domain: str | None = Field(default=None, description="column: the image's origin")
    group: str | None = Field(default=None, description="column: equal values are held out together (the patient)")
    labels: Names | None = Field(
        default=None, description="the classes' names in order; unset, those in the table, or labels are numbers"
    )
    absent: Absent | None = Field(
        default=None, description="the names in `labels` of which this site has no example, or `any`"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.folder is None) == (self.file is None):
            raise ValueError("give either folder or file")
        if self.folder is None and self.domain_folders:
            raise ValueError("domain_folders needs folder; with file, name a column in domain")
        if self.folder is not None and self.model_fields_set & {"image", "label", "domain", "group", "split"}:
            raise ValueError("image, label, domain, group and split are about a file: with folder, leave them out")
        return self


def images(options: ImagesOptions) -> Dataset:
    """Return `pixel_values` float32 [n, channels, height, width], a processor's other inputs, `labels` int64 [n].

    An example's source is the digest of its image's file. Raises DataError.
    """
    groups, report = None, LoadReport()
    if options.folder is not None:
        pictures, labels, domains, report = _in_folder(options.folder, options)
    else:
        table = read_table("file", options.file or (), options.split)
        values = table.column("label", options.label)
        cells = enumerate(table.column("image", options.image))
        pictures = [_picture(value, row, table.folder, table.where) for row, value in cells]
        names = options.labels or table.columns.classes.get(options.label)
        labels = numbered("label", table.where, values, names, options.absent)
        domains, groups = table.domains(options.domain), table.groups(options.group)
        report = LoadReport(ignored_files=table.ignored_files)
    prepare = preparation(options)
    inputs, on_disk = inputs_of(pictures, options, prepare)
    tensors = {**inputs, LABELS: torch.tensor(labels)}
    sources = [_digest(picture) for picture in pictures]
    shapes = {PIXELS: fixed_shape(options, prepare), LABELS: ()}
    dataset = Dataset(tensors, domains=domains, sources=sources, groups=groups, report=report, on_disk=on_disk)
    known = {name: values for name, values in dataset.inputs.items() if name in shapes}
    return replace(dataset, schema=schema_of(known, shapes, len(options.labels or ()) or None))


def _digest(picture: Picture) -> bytes:
    if isinstance(picture, bytes):
        return hashlib.sha256(picture).digest()
    with picture.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _picture(value: object, row: int, folder: Path, where: str) -> Picture:
    """Return the image in a table's cell: a path, bytes, or a record of both as `datasets` writes it."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        return folder / value
    if isinstance(value, bytes) and value:
        return value
    raise DataError(f"image: row {row} of {where} has neither a path nor an image's bytes")


def _in_folder(folder: Path, options: ImagesOptions) -> tuple[list[Picture], list[int], Tensor | None, LoadReport]:
    """Return the images below `folder/CLASS` or `folder/DOMAIN/CLASS`, at any depth, by path, their labels and
    domains, and the number of files that are not images."""
    if not folder.is_dir():
        raise DataError(f"folder: {absent(folder)}")
    if is_saved(folder):
        raise DataError(
            f"folder: {folder} was saved by `datasets`, as a table: name it in `file` instead of `folder`"
        )
    depth = 2 if options.domain_folders else 1
    found = list(files_below(folder))
    files = sorted(file.relative_to(folder) for file in found if file.suffix.lower() in SUFFIXES)
    others = Counter(file.suffix.lower() or "without suffix" for file in found if file.suffix.lower() not in SUFFIXES)
    dicom = "; convert DICOM files to PNG first" if others.keys() & DICOM else ""
    where = f"{folder} (ignored: {counted(others)}{dicom})" if others else str(folder)
    steps = [file.parts for file in files]
    if misplaced := [file for file in files if len(file.parts) <= depth]:
        raise DataError(f"folder: {folder / misplaced[0]} is not in the folder of a class: move it into one")
    if not files:
        raise DataError(
            f"folder: {where} contains no images ({', '.join(sorted(SUFFIXES))}); name one with folders of them"
        )
    labels = numbered("folder", where, [parts[depth - 1] for parts in steps], options.labels, options.absent)
    domains = numbered_domains([parts[0] for parts in steps]) if options.domain_folders else None
    return [folder / file for file in files], labels, domains, LoadReport(ignored_files=others)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the paths of all files below a folder that are not hidden.

    Follows links, except one to a folder that contains it.
    """
    for at, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        here = Path(at)
        # Some systems and programs leave hidden files and folders beside images, with the same suffixes.
        above = here.resolve().is_relative_to
        folders[:] = [name for name in folders if name[0] != "." and not above((here / name).resolve())]
        yield from (here / name for name in names if name[0] != "." and (here / name).is_file())


def _refuse(fault: OSError) -> None:
    raise DataError(f"folder: {fault.filename} cannot be read: {fault.strerror}") from fault


ADAPTER = Adapter("images", ImagesOptions, images)
