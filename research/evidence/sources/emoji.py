"""Emoji in the drawings of four vendors: one concept in four styles, with its name and its subgroup.

A vendor is a domain, as a style is in DomainNet. The concepts are those that all four vendors draw. Two thirds of
each subgroup's concepts are public: a model of images and texts may be trained on them. Sites have the other third,
of the subgroups in TASK_GROUPS with MIN_CONCEPTS concepts or more: a task of 19 classes.

The drawings are rendered into the cache. Of these vendors, OpenMoji is under CC BY-SA: publish no rendering.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from evidence.sources.dinov2 import MEAN, STD
from evidence.sources.packages import (
    EMOJIBASE,
    FLUENT,
    NOTO,
    OPENMOJI,
    TWEMOJI,
    Fetch,
    NpmPackage,
    download,
    library,
    unpacked,
)
from evidence.sources.sites import Indices, Parts, drawn
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.normalization import PixelNormalization

VENDORS: Mapping[str, NpmPackage] = {"noto": NOTO, "twemoji": TWEMOJI, "openmoji": OPENMOJI, "fluent": FLUENT}
PUBLIC_VENDORS = ("noto", "openmoji")
"""The vendors whose public concepts a model may be trained on. The other two are new to it."""
PUBLIC_SHARE = 2 / 3
"""Share of each subgroup's concepts."""
TASK_GROUPS = (
    "smileys-emotion",
    "animals-nature",
    "food-drink",
    "travel-places",
    "activities",
    "objects",
)
"""Without people, symbols and flags, whose subgroups look alike or have no look."""
MIN_CONCEPTS = 18
"""Concepts of a subgroup of the task, public ones included."""
TEST_SHARE = 0.25
VALIDATION_SHARE = 0.15
"""Shares of each vendor's drawings of a subgroup."""
ALPHA = 0.3
PRESENTATION = "fe0f"
"""The code point that asks for the coloured form. Vendors write it or leave it out."""

Shift = Literal["label", "domain", "both"]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Concept:
    """An emoji: its code points such as `1f408-200d-2b1b`, its CLDR name, and its group and subgroup in Unicode."""

    code: str
    name: str
    group: str
    subgroup: str


@dataclass(frozen=True)
class Drawing:
    """A vendor's drawing of a concept, as the text of an SVG file."""

    vendor: str
    concept: Concept
    svg: str


# ---------------------------------------------------------------- reading


def read(cache: Path, fetch: Fetch = download) -> list[Drawing]:
    """Return every vendor's drawings of the concepts that all of them draw: the vendors one after another, each with
    its concepts in the same order. Raises PackageUnusable.
    """
    of_base = unpacked(EMOJIBASE, cache, fetch)
    data, groups = (json.loads((of_base / member).read_bytes()) for member in EMOJIBASE.members)
    by_vendor = {}
    for vendor, package in VENDORS.items():
        folder = unpacked(package, cache, fetch)
        icons, codes = (json.loads((folder / member).read_bytes()) for member in package.members[:2])
        by_vendor[vendor] = svgs_of(icons, codes)
    return common(list(concepts_of(data, groups)), by_vendor)


def concepts_of(data: Sequence[Mapping[str, Any]], groups: Mapping[str, Any]) -> Iterator[Concept]:
    """Yield the emoji of emojibase that belong to a group, without variants of skin colour."""
    for entry in data:
        if "subgroup" in entry:
            group, subgroup = (groups[f"{kind}s"][str(entry[kind])] for kind in ("group", "subgroup"))
            yield Concept(plain_code(entry["hexcode"]), entry["label"], group, subgroup)


def svgs_of(icons: Mapping[str, Any], codes: Mapping[str, str]) -> dict[str, str]:
    """Return a package's drawings by code points, from its two files."""
    found: dict[str, str] = {}
    for code, name in sorted(codes.items()):
        icon = icons["icons"][name]
        # An icon's own size comes before the set's.
        left, top, width, height = (
            icon.get(side, icons.get(side, default))
            for side, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        )
        box = f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}"'
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box}>'
        found.setdefault(plain_code(code), f"{svg}{icon['body']}</svg>")
    return found


def common(concepts: Sequence[Concept], by_vendor: Mapping[str, Mapping[str, str]]) -> list[Drawing]:
    """Return the drawings of the concepts that all vendors draw."""
    kept = [concept for concept in concepts if all(concept.code in of_vendor for of_vendor in by_vendor.values())]
    return [Drawing(vendor, concept, svgs[concept.code]) for vendor, svgs in by_vendor.items() for concept in kept]


def plain_code(code: str) -> str:
    """Return code points in small letters, without the one that asks for the coloured form."""
    return "-".join(point for point in code.lower().split("-") if point != PRESENTATION)


def public_codes(concepts: Sequence[Concept]) -> set[str]:
    """Return the code points of the public concepts: PUBLIC_SHARE of each subgroup, by a hash."""
    by_subgroup: dict[str, list[str]] = defaultdict(list)
    for concept in concepts:
        by_subgroup[concept.subgroup].append(concept.code)
    return {
        code
        for codes in by_subgroup.values()
        for code in sorted(codes, key=lambda each: hashlib.sha256(each.encode()).digest())[
            : round(PUBLIC_SHARE * len(codes))
        ]
    }


def rendered(svg: str, side: int) -> Pixels:
    """Return a drawing on white, uint8 [side, side, 3]. Raises PackageUnusable without the library."""
    png = library("resvg_py").svg_to_bytes(svg_string=svg, width=side, height=side)
    drawing = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    # One that is not square is centred.
    page = Image.new("RGBA", (side, side), "white")
    page.alpha_composite(drawing, ((side - drawing.width) // 2, (side - drawing.height) // 2))
    return np.asarray(page.convert("RGB"))


# ---------------------------------------------------------------- images


@dataclass(frozen=True)
class Emoji:
    """Rendered drawings. The arrays have a row for each drawing, the lists an entry for each concept or class."""

    pixels: Pixels
    """[drawings, side, side, 3], on white."""
    vendors: Indices
    """[drawings], places in VENDORS."""
    concepts: Indices
    """[drawings], places in `names`."""
    public: NDArray[np.bool_]
    """[concepts]"""
    labels: Indices
    """[concepts], classes of the task from 0, or -1 for a concept that is not in it."""
    names: Sequence[str]
    """[concepts], in CLDR."""
    subgroups: Sequence[str]
    """[concepts], in Unicode."""
    classes: Sequence[str]
    """The subgroups of the task, by name."""

    @classmethod
    def of(cls, drawings: Sequence[Drawing], side: int) -> Self:
        """Render drawings, those of a concept in all vendors. Raises PackageUnusable without the library."""
        concepts = list(dict.fromkeys(drawing.concept for drawing in drawings))
        place = {concept: number for number, concept in enumerate(concepts)}
        public = public_codes(concepts)
        classes = task_classes(concepts)
        return cls(
            np.stack([rendered(drawing.svg, side) for drawing in drawings]),
            np.array([list(VENDORS).index(drawing.vendor) for drawing in drawings]),
            np.array([place[drawing.concept] for drawing in drawings]),
            np.array([concept.code in public for concept in concepts]),
            np.array([classes.index(each.subgroup) if each.subgroup in classes else -1 for each in concepts]),
            [concept.name for concept in concepts],
            [concept.subgroup for concept in concepts],
            classes,
        )

    def save(self, file: Path) -> None:
        """Write everything into a file of numpy, compressed."""
        np.savez_compressed(
            file,
            pixels=self.pixels,
            vendors=self.vendors,
            concepts=self.concepts,
            public=self.public,
            labels=self.labels,
            names=np.array(self.names),
            subgroups=np.array(self.subgroups),
            classes=np.array(self.classes),
        )

    @classmethod
    def load(cls, file: Path) -> Self:
        with np.load(file) as arrays:
            numbers = (arrays[name] for name in ("pixels", "vendors", "concepts", "public", "labels"))
            return cls(*numbers, *(arrays[name].tolist() for name in ("names", "subgroups", "classes")))

    def to_train_on(self) -> Indices:
        """Return the drawings that a model may be trained on before the federation."""
        allowed = [number for number, vendor in enumerate(VENDORS) if vendor in PUBLIC_VENDORS]
        return np.flatnonzero(self.public[self.concepts] & np.isin(self.vendors, allowed))

    def dataset(self, rows: Indices) -> Dataset:
        """Return these drawings for a backbone: `pixel_values` float32 [rows, 3, side, side], `labels` int64 [rows],
        with the vendor as the domain."""
        normalized = PixelNormalization(MEAN, STD)
        tensors = {
            "pixel_values": normalized(torch.from_numpy(self.pixels[rows])),
            "labels": torch.from_numpy(self.labels[self.concepts[rows]]),
        }
        return Dataset(tensors, domains=torch.from_numpy(self.vendors[rows]), normalization=normalized)


def task_classes(concepts: Sequence[Concept]) -> list[str]:
    """Return the subgroups of the task, by name."""
    counts: dict[str, int] = defaultdict(int)
    for concept in concepts:
        if concept.group in TASK_GROUPS:
            counts[concept.subgroup] += 1
    return sorted(name for name, count in counts.items() if count >= MIN_CONCEPTS)


# ---------------------------------------------------------------- splits


@dataclass(frozen=True)
class Site:
    """A site's drawings. It is tested on all held-out drawings of its vendors, with weights by its own classes."""

    parts: Parts
    validation_weights: NDArray[np.float64]
    """[validation], of sum 1."""
    test_weights: NDArray[np.float64]
    """[test], of sum 1."""


def split(emoji: Emoji, seed: int, shift: Shift, sites_per_vendor: int = 3, alpha: float = ALPHA) -> dict[str, Site]:
    """Divide the drawings of concepts that are not public among sites, the same number at each, up to one.

    With the shift `label` every site has drawings of all vendors and Dirichlet shares of the classes; with `domain`
    it has one vendor's, and equal shares; with `both`, one vendor's and Dirichlet shares. No drawing is on two of the
    sides of training, validation and test. A concept that a site is tested on may be trained on elsewhere, in another
    vendor's drawing: that is what sites can learn from each other. Raises ValueError for an unknown shift.
    """
    if shift not in get_args(Shift):
        raise ValueError(f"no shift {shift!r}: take one of {', '.join(get_args(Shift))}")
    random = np.random.default_rng(seed)
    sides = _sides(emoji, random)
    found = {}
    # A place among VENDORS for each pool of drawings, or all of them.
    everything = tuple(range(len(VENDORS)))
    pools = [everything] if shift == "label" else [(vendor,) for vendor in everything]
    for pool in pools:
        rows, of_validation, of_test = (side[np.isin(emoji.vendors[side], pool)] for side in sides)
        sites = sites_per_vendor * len(pool)
        labels = emoji.labels[emoji.concepts]
        sizes = [len(part) for part in np.array_split(rows, sites)]
        # Equal shares are those of a large alpha.
        shares = 1e6 if shift == "domain" else alpha
        for number, places in enumerate(drawn(labels[rows], sizes, shares, random), 1):
            of_site = np.sort(rows[places])
            name = f"{'mixed' if len(pool) > 1 else list(VENDORS)[pool[0]]}-{number}"
            weights = (_weights(labels[of_site], labels[side]) for side in (of_validation, of_test))
            found[name] = Site(Parts(of_site, of_validation, of_test), *weights)
    return found


def _sides(emoji: Emoji, random: np.random.Generator) -> tuple[Indices, Indices, Indices]:
    """Return the drawings to train on, for the validation and for the test: some of each vendor's of each class."""
    train: list[Indices] = []
    validation: list[Indices] = []
    test: list[Indices] = []
    labels, public = emoji.labels[emoji.concepts], emoji.public[emoji.concepts]
    for vendor, label in product(range(len(VENDORS)), range(len(emoji.classes))):
        drawn = random.permutation(np.flatnonzero((emoji.vendors == vendor) & (labels == label) & ~public))
        of_test = max(1, round(TEST_SHARE * len(drawn)))
        of_validation = max(1, round(VALIDATION_SHARE * len(drawn)))
        parts = np.split(drawn, [of_test, of_test + of_validation])
        for side, part in zip((test, validation, train), parts, strict=True):
            side.append(part)
    return np.concatenate(train), np.concatenate(validation), np.concatenate(test)


def _weights(own: Indices, labels: Indices) -> NDArray[np.float64]:
    """Return a weight for each of the `labels`, such that the classes weigh as they occur in `own`."""
    counts, present = (np.bincount(each, minlength=int(labels.max()) + 1) for each in (own, labels))
    weights = counts[labels] / present[labels]
    return np.asarray(weights / weights.sum())
