"""Clinical phrases with the chapter of ICD-10-CM that each belongs to: a task of 21 classes in three wordings.

The wordings are those of three kinds of sites: the official titles of ICD-10-CM, its inclusion terms (the words of
clinicians), and the titles of ICD-9-CM. The phrases are a vocabulary of medicine, not notes about patients.

Equal phrases count once, and at most MOST of a category and wording are kept, because the titles of some categories
differ only in side and visit. Training and test phrases are of different categories: within a category phrases are
near-duplicates.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from evidence.sources.packages import ICDMAP, SIMPLE_ICD_10_CM, Fetch, download, unpacked
from tessera.worker.data.dataset import Dataset

WORDINGS = ("icd-9", "term", "title")
"""From the fewest phrases to the most. A phrase in several wordings belongs to the first of them."""
CHAPTERS = 21
"""Chapter 22, codes for special purposes, has eleven phrases and is left out."""
MOST = 12
"""Phrases of a category and wording."""
CATEGORY_LETTERS = 3
"""The start of a code that is its category."""

TEST_SHARE = 0.15
VALIDATION_SHARE = 0.1
"""Shares of each chapter's categories."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Phrase:
    """A phrase with its wording, its category such as `A00`, and its chapter, from 1."""

    text: str
    wording: str
    category: str
    chapter: int


# ---------------------------------------------------------------- reading


def read(cache: Path, fetch: Fetch = download) -> list[Phrase]:
    """Return all phrases, cleaned, in an order that depends on them alone. Raises PackageUnusable."""
    tabular = unpacked(SIMPLE_ICD_10_CM, cache, fetch) / SIMPLE_ICD_10_CM.members[0]
    mapping = unpacked(ICDMAP, cache, fetch) / ICDMAP.members[0]
    found = list(of_tabular(tabular))
    chapters = {phrase.category: phrase.chapter for phrase in found}
    return cleaned([*found, *of_mapping(mapping, chapters)])


def of_tabular(file: Path) -> Iterator[Phrase]:
    """Yield the titles and inclusion terms of the tabular list of ICD-10-CM."""
    # Of a wheel whose digest was checked.
    root = ET.parse(file).getroot()  # noqa: S314
    for chapter in root.findall("chapter"):
        number = int(chapter.findtext("name", ""))
        for code in chapter.iter("diag"):
            category = code.findtext("name", "")[:CATEGORY_LETTERS]
            yield Phrase(_plain(code.findtext("desc", "")), "title", category, number)
            for note in code.findall("inclusionTerm/note"):
                yield Phrase(_plain("".join(note.itertext())), "term", category, number)


def of_mapping(file: Path, chapters: Mapping[str, int]) -> Iterator[Phrase]:
    """Yield the titles of ICD-9-CM whose codes of ICD-10-CM are all in one of the `chapters`, by category.

    A title is in the category of most of its codes; of equals, in the first by name.
    """
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        rows = database.execute('SELECT "ICD-9 English", "ICD-10" FROM icd_mapping').fetchall()
    categories: dict[str, list[str]] = defaultdict(list)
    for title, code in rows:
        if title and code:
            categories[_plain(title)].append(code[:CATEGORY_LETTERS])
    for title, of_title in sorted(categories.items()):
        if len({chapters.get(category) for category in of_title}) == 1 and of_title[0] in chapters:
            category = max(sorted(set(of_title)), key=of_title.count)
            yield Phrase(title, "icd-9", category, chapters[category])


def cleaned(found: Iterable[Phrase]) -> list[Phrase]:
    """Return the phrases of the chapters in use: equal ones once, and at most MOST of a category and wording."""
    by_wording: dict[str, list[Phrase]] = {wording: [] for wording in WORDINGS}
    for phrase in found:
        if phrase.text and phrase.chapter <= CHAPTERS:
            by_wording[phrase.wording].append(phrase)
    seen: set[str] = set()
    counts: dict[tuple[str, str], int] = defaultdict(int)
    kept = []
    for phrases in by_wording.values():
        # By a hash, so that those of a category that are kept are not all of its first codes.
        for phrase in sorted(phrases, key=lambda each: (_hash(each.text), each.category)):
            place = (phrase.category, phrase.wording)
            if (same := phrase.text.casefold()) not in seen and counts[place] < MOST:
                seen.add(same)
                counts[place] += 1
                kept.append(phrase)
    return kept


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Encoded:
    """Phrases as tokens, without their texts. All arrays have one row for each phrase."""

    tokens: Indices
    """[phrases, width], padded with 0."""
    wordings: Indices
    """[phrases], places in WORDINGS."""
    categories: Indices
    """[phrases], numbers of categories."""
    labels: Indices
    """[phrases], chapters from 0."""

    @classmethod
    def of(cls, phrases: Sequence[Phrase], tokens: Indices) -> Self:
        """Return the phrases with their tokens, [phrases, width]."""
        names = {name: number for number, name in enumerate(sorted({phrase.category for phrase in phrases}))}
        return cls(
            tokens,
            np.array([WORDINGS.index(phrase.wording) for phrase in phrases]),
            np.array([names[phrase.category] for phrase in phrases]),
            np.array([phrase.chapter - 1 for phrase in phrases]),
        )

    def save(self, file: Path) -> None:
        """Write the arrays into a file of numpy, compressed."""
        np.savez_compressed(
            file,
            tokens=self.tokens.astype(np.uint16),
            wordings=self.wordings.astype(np.uint16),
            categories=self.categories.astype(np.uint16),
            labels=self.labels.astype(np.int64),
        )

    @classmethod
    def load(cls, file: Path) -> Self:
        with np.load(file) as arrays:
            names = ("tokens", "wordings", "categories", "labels")
            return cls(*(arrays[name].astype(np.int64) for name in names))

    def dataset(self, rows: Indices) -> Dataset:
        """Return these phrases: `input_ids` and `attention_mask` int64 [rows, width], `labels` int64 [rows]."""
        tokens = torch.from_numpy(self.tokens[rows])
        labels = torch.from_numpy(self.labels[rows])
        return Dataset({"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels})


# ---------------------------------------------------------------- splits


@dataclass(frozen=True)
class Split:
    """A seed's phrases for each site, for the choice of settings and for the test. No category is in two of them."""

    sites: Mapping[str, Indices]
    validation: Indices
    test: Indices


def split(phrases: Encoded, seed: int, sites_per_wording: int, examples: int) -> Split:
    """Divide the phrases by category, and draw `examples` of one wording for each site.

    Raises ValueError if a wording has too few phrases for its sites.
    """
    random = np.random.default_rng(seed)
    test, validation = _sides(phrases, random)
    training = ~np.isin(phrases.categories, [*test, *validation])
    sites: dict[str, Indices] = {}
    for number, wording in enumerate(WORDINGS):
        rows = random.permutation(np.flatnonzero(training & (phrases.wordings == number)))
        if len(rows) < sites_per_wording * examples:
            raise ValueError(
                f"wording {wording} has {len(rows)} phrases to train on, too few for {sites_per_wording} sites of "
                f"{examples}: lower one of the two"
            )
        for site in range(sites_per_wording):
            sites[f"{wording}-{site + 1}"] = np.sort(rows[site * examples : (site + 1) * examples])
    of_test, of_validation = (np.flatnonzero(np.isin(phrases.categories, side)) for side in (test, validation))
    return Split(sites, of_validation, of_test)


def _sides(phrases: Encoded, random: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return the categories of the test and of the validation: one at least of each chapter that has three."""
    test: list[int] = []
    validation: list[int] = []
    for label in np.unique(phrases.labels):
        drawn = random.permutation(np.unique(phrases.categories[phrases.labels == label])).tolist()
        of_test = max(1, round(TEST_SHARE * len(drawn)))
        of_validation = max(1, round(VALIDATION_SHARE * len(drawn)))
        test += drawn[:of_test]
        validation += drawn[of_test : of_test + of_validation]
    return test, validation
