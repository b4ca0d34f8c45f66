"""Images for classification: a folder with a folder for each class, or a table of paths or image bytes.

[datasets.scans]
kind = "images"
folder = "/data/scans"
labels = ["benign", "malignant"]
processor = "/models/vit"
"""

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from tessera.shared.model.dataset_schema import PIXELS
from tessera.shared.near_names import absent
from tessera.shared.version import install_line
from tessera.worker.data.cells import Cells
from tessera.worker.data.dataset import LABELS, Adapter, Dataset, schema_of
from tessera.worker.data.groups import (
    PATIENT,
    PERSON_IN_PATH,
    RepeatedName,
    Subgroups,
    in_paths,
    is_unnamed,
    person_of,
    repeated,
)
from tessera.worker.data.load_report import LoadReport, by_suffix, counted
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.readers.absent_files import in_its_form
from tessera.worker.data.readers.class_labels import combinations, numbered
from tessera.worker.data.readers.data_folders import foreign, names_below
from tessera.worker.data.readers.image_index import INDEX_FILE, PixelInputs, inputs_of
from tessera.worker.data.readers.image_processor import PixelOptions, preparation
from tessera.worker.data.readers.pictures import (
    DICOM,
    SUFFIXES,
    DicomReader,
    Pictures,
    is_dicom,
    path_in,
)
from tessera.worker.data.readers.table_files import TableOptions, is_saved
from tessera.worker.data.readers.tables import DataTable, Files, numbered_domains, read_table, table_name
from tessera.worker.data.targets.numbers import numbers_of, unlabelled
from tessera.worker.errors import DataError

OF_TABLES = frozenset(
    {"image", "label", "domain", "split", "separator", "subgroups", "problem_type", "label_columns"}
)
"""The options that only a table has."""


class ImagesOptions(PixelOptions, TableOptions):
    folder: Path | None = Field(default=None, description="contains a folder of images for each class")
    domain_folders: bool = Field(default=False, description="`folder` contains such a folder for each domain")
    file: Files | None = Field(
        default=None, description="a table with a row for each image, in any form that `text` reads"
    )
    image: str = Field(default="image", description="column: the image's path, from the table's folder, or its bytes")
    label: str = Field(default="label", description="column: the class")
    group: str | None = Field(
        default=None,
        description="column, or with folder a DICOM keyword or a pattern for paths, with the group in parentheses: "
        "equal values are held out together (the patient)",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.folder is None) == (self.file is None):
            raise ValueError("give either folder or file")
        if self.folder is None and self.domain_folders:
            raise ValueError("domain_folders needs folder; with file, name a column in domain")
        if self.folder is not None and self.model_fields_set & OF_TABLES:
            raise ValueError(f"{', '.join(sorted(OF_TABLES))} are about a file: with folder, leave them out")
        if self.folder is not None and self.group is not None and self.keyword is None:
            try:
                parentheses = re.compile(self.group).groups
            except re.error as fault:
                raise ValueError(f"group: {self.group!r} is not a regular expression: {fault}") from None
            if parentheses != 1:
                raise ValueError(
                    f"group: {self.group!r} has {parentheses} groups in parentheses. With folder, give a pattern "
                    f'with one, such as "(patient[0-9]+)_", or with dicom = true a keyword such as {PATIENT!r}'
                )
        return self

    @property
    def keyword(self) -> str | None:
        """The keyword of DICOM headers that `group` names; None if it is a column or a pattern for paths."""
        is_keyword = self.dicom and self.folder is not None and self.group is not None and self.group.isidentifier()
        return self.group if is_keyword else None

    @property
    def suffixes(self) -> frozenset[str]:
        """The suffixes of images, in lower case."""
        return SUFFIXES | DICOM if self.dicom else SUFFIXES


def images(options: ImagesOptions, prepared: PreparedFolder = NOT_KEPT) -> Dataset:
    """Return `pixel_values` float32 [n, channels, height, width], a processor's other inputs, `labels` int64 [n].

    Several labels and targets are float32, as `numbers_of` returns them.

    An example's source is the digest of its image's file. If the pixels stay on disk, `prepared` gets an index of
    the images, with which a later start reads only those that have changed. Raises DataError.
    """
    listed = _in_table(options, prepared) if options.folder is None else _in_folder(options.folder, options)
    # Before the images are read, which takes longer.
    labels = listed.numbers
    if labels is None:
        labels = torch.tensor(numbered(*listed.labels, listed.names, options.absent))
    conversion = preparation(options)
    inputs = inputs_of(listed.pictures, options, conversion, prepared)
    places = torch.from_numpy(inputs.places)
    if inputs.unreadable and listed.numbers is None:
        option, where, values = listed.labels
        numbered(option, where, [values[place] for place in inputs.places], listed.names, options.absent)
    shapes = {PIXELS: conversion.pixels_shape(options.mode), LABELS: tuple(labels.shape[1:])}
    groups = inputs.groups if options.keyword else listed.groups and listed.groups.chosen(inputs.places)
    dataset = Dataset(
        {**inputs.tensors, LABELS: labels[places]},
        domains=None if listed.domains is None else listed.domains[places],
        sources=inputs.digests,
        groups=groups,
        sides=inputs.sides,
        subgroups={name: column.rows(places) for name, column in listed.subgroups.items()},
        report=replace(
            listed.report,
            unreadable=inputs.unreadable,
            partly_read=inputs.partly_read,
            copies=len(inputs.digests) - len(np.unique(inputs.digests, axis=0)),
            ungrouped=() if options.group else _ungrouped(listed, inputs),
            without_group=sum(map(is_unnamed, groups or ())),
            combined=[] if options.problem else combinations(listed.names or ()),
            unlabelled=unlabelled(labels[places]),
        ),
        on_disk=inputs.on_disk,
        normalization=conversion.normalization(options.mode),
    )
    known = {name: values for name, values in dataset.inputs.items() if name in shapes}
    report = replace(dataset.report, contradictions=_contradictions(listed, inputs.places, dataset))
    return replace(dataset, report=report, schema=schema_of(known, shapes, None, options.labels, options.problem))


@dataclass(frozen=True)
class _Listed:
    """The images that a folder or a table lists, none of them read."""

    pictures: Pictures
    labels: tuple[str, str, Sequence[object]]
    """The option that labels come from, the place for people, and the label of each image."""
    names: Sequence[str] | None
    domains: Tensor | None
    groups: Cells[bytes] | None
    subgroups: Mapping[str, Subgroups]
    report: LoadReport
    """The findings about the folder or the table."""
    numbers: Tensor | None = None
    """The labels where they are numbers, [images, ...]."""


def _ungrouped(listed: _Listed, inputs: PixelInputs) -> list[RepeatedName]:
    """Return the names in columns, headers and paths that are probably a person's, and repeat."""
    pictures, remedy = listed.pictures, "If it is, add a column with the patient to the table, and name it in group."
    in_folder = listed.labels[0] == "folder"
    by_header = f'Set group = "{PATIENT}".' if in_folder else remedy
    headers = repeated(f"{PATIENT} in the images' headers", inputs.groups, by_header)
    keys = map(os.fsdecode, filter(None, pictures.paths.tolist()))
    remedy = f"Set group = '{PERSON_IN_PATH}', or a pattern of your own, if it is." if in_folder else remedy
    paths = in_paths((person_of(PERSON_IN_PATH, key) for key in keys), remedy)
    return [*listed.report.ungrouped, *filter(None, [headers, paths])]


def _in_table(options: ImagesOptions, prepared: PreparedFolder) -> _Listed:
    table = read_table("file", options.file or (), options.split, prepared, options.separator)
    # Of a table that has changed since.
    prepared.clear(lambda name: name in (INDEX_FILE, table_name(table.digest)))
    pictures = _pictures(table, options)
    ignored, without_row = _beside(table, pictures, options)
    return _Listed(
        pictures,
        ("label", table.where, [] if options.problem else table.column("label", options.label)),
        options.labels or table.class_names(options.label),
        table.domains(options.domain),
        table.groups(options.group),
        table.subgroups(options.subgroups),
        LoadReport(
            ignored_files=by_suffix(ignored),
            passed_over=table.passed_over,
            without_row=without_row,
            group_bytes=pictures.cells.group_bytes if pictures.cells else 0,
            ungrouped=table.ungrouped(options.group, options.image, options.label),
        ),
        numbers_of(table, options, options.label) if options.problem else None,
    )


def _pictures(table: DataTable, options: ImagesOptions) -> Pictures:
    """Return the images of a table's column: paths from its folder, bytes, or records of both as `datasets` writes
    them. Raises DataError if a row has neither."""
    values = table.cells("image", options.image)
    if cells := table.byte_cells(options.image):
        return Pictures.in_cells(table.folder, cells, table.where, _dicom_reader(options))
    paths = [path_in(value) for value in values]
    if lacking := [row for row, path in enumerate(paths) if not path]:
        raise DataError(f"image: row {lacking[0]} of {table.where} has neither a path nor an image's bytes")
    there = (in_its_form(table.folder, path) for path in paths if path)
    return Pictures.of(table.folder, there, _dicom_reader(options))


def _beside(table: DataTable, pictures: Pictures, options: ImagesOptions) -> tuple[list[Path], list[str]]:
    """Return the files in folders of tables that are no images, and the images without a row in these folders and in
    the folders of the table's images."""
    paths = list(filter(None, pictures.paths.tolist()))
    if not paths:
        return list(table.other_files), []
    real = cache(os.path.realpath)
    listed: dict[str, set[str]] = {}
    for path in paths:
        folder, name = os.path.split(os.path.join(str(table.folder), os.fsdecode(path)))  # noqa: PTH118
        listed.setdefault(str(real(folder)), set()).add(name)
    for top in filter(Path.is_dir, options.file or ()):
        for name in names_below(top)[0]:
            listed.setdefault(str(real((top / name).parent)), set())
    without_row: list[str] = []
    for folder, names in listed.items():
        # A folder that is missing, or may not be read, is refused with its images.
        with suppress(OSError):
            others = (path for path in Path(folder).iterdir() if path.name not in names and not foreign(path.name))
            without_row += [str(path) for path in others if path.is_file() and _is_image(str(path), options)]
    ignored = [
        file
        for file in table.other_files
        if file.name not in listed.get(str(real(file.parent)), ()) and not _is_image(str(file), options)
    ]
    return ignored, sorted(without_row)


def _is_image(path: str, options: ImagesOptions) -> bool:
    suffix = os.path.splitext(path)[1].lower()  # noqa: PTH122  (a path for each takes ten times as long)
    return suffix in options.suffixes or (options.dicom and is_dicom_image(Path(path)))


def _contradictions(listed: _Listed, places: NDArray[np.int64], dataset: Dataset) -> list[str]:
    """Return the names and labels of images with the same bytes and different classes."""
    values, name = listed.labels[2], listed.pictures.name
    pairs = [map(int, places[list(pair)]) for pair in dataset.contradictions()]
    return [" and ".join(f"{name(place)} ({values[place]!r})" for place in pair) for pair in pairs]


def _dicom_reader(options: ImagesOptions) -> DicomReader | None:
    return dicom_reader(options.window, options.keyword or PATIENT) if options.dicom else None


def dicom_reader(window: tuple[float, float] | None = None, group: str = PATIENT) -> DicomReader:
    """Return a reader of DICOM files, and of the keyword `group` in their headers. Raises DataError if the extra is
    not installed, or if there is no such keyword."""
    try:
        reader = importlib.import_module("tessera.worker.data.readers.dicom")
        reader.require_keyword(group)
        return partial(reader.read_dicom, window=window, group=group)
    except ModuleNotFoundError as fault:
        raise DataError(f"dicom: {fault.name} is not installed: {install_line('dicom')}") from fault


def _in_folder(folder: Path, options: ImagesOptions) -> _Listed:
    """Return the images below `folder/CLASS` or `folder/DOMAIN/CLASS`, at any depth, by path."""
    if not folder.is_dir():
        raise DataError(f"folder: {absent(folder)}")
    if is_saved(folder):
        raise DataError(
            f"folder: {folder} was saved by `datasets`, as a table: name it in `file` instead of `folder`"
        )
    if no_classes := sorted(filter(foreign, options.labels or ())):
        raise DataError(
            f"labels: {', '.join(map(repr, no_classes))}: a system or a program leaves folders of this name beside "
            "data, and they are passed over: take it out of labels at every site; or, if it is a class, give it and "
            "its folder another name"
        )
    depth = 2 if options.domain_folders else 1
    names, passed_over = names_below(folder)
    files = [name for name in names if _is_image(f"{folder}{os.sep}{name}", options)]
    others = by_suffix(map(Path, set(names).difference(files)))
    # As paths are sorted, by one part after the other.
    files.sort(key=lambda name: name.replace(os.sep, "\0"))
    dicom = "; set dicom = true to read DICOM files" if others.keys() & DICOM else ""
    where = f"{folder} (ignored: {counted(others)}{dicom})" if others else str(folder)
    steps = [name.split(os.sep, depth) for name in files]
    if misplaced := [name for name, parts in zip(files, steps, strict=True) if len(parts) <= depth]:
        raise DataError(f"folder: {folder / misplaced[0]} is not in the folder of a class: move it into one")
    if not files:
        raise DataError(
            f"folder: {where} contains no images ({', '.join(sorted(options.suffixes))}); name one with folders of "
            "them"
        )
    domains = numbered_domains([parts[0] for parts in steps]) if options.domain_folders else None
    labels = ("folder", where, [parts[depth - 1] for parts in steps])
    return _Listed(
        Pictures.of(folder, files, _dicom_reader(options)),
        labels,
        options.labels,
        domains,
        _groups_of_paths(folder, files, options.group) if options.group and not options.keyword else None,
        {},
        LoadReport(ignored_files=others, passed_over=passed_over),
    )


def _groups_of_paths(folder: Path, names: Sequence[str], pattern: str) -> Cells[bytes]:
    """Return the match of the pattern's group in each path. Raises DataError if it does not match one."""
    groups = [person_of(pattern, name.replace(os.sep, "/")) for name in names]
    if lacking := [name for name, group in zip(names, groups, strict=True) if not group]:
        raise DataError(
            f"group: {pattern!r} matches nothing in {len(lacking)} of {len(names)} paths below {folder}, such as "
            f"{lacking[0]}: extend the pattern, or move these images elsewhere"
        )
    return Cells(lambda rows: [groups[row] for row in rows.tolist()], np.arange(len(groups)))


def is_dicom_image(path: Path) -> bool:
    """Return True if a file is DICOM, and not a DICOMDIR, which lists the files of a medium."""
    return path.name.upper() != "DICOMDIR" and is_dicom(path)


ADAPTER = Adapter("images", ImagesOptions, images, images)
