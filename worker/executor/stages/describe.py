"""The stage that reads the subjects of a data set for its description. The agent decides which counts leave."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tessera.shared.api.class_counts import MAX_CLASSES
from tessera.shared.api.descriptions import BINS, UNKNOWN_SHARES, TableName
from tessera.shared.model.dataset_schema import IDS
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import LABELS, Dataset, RawTexts
from tessera.worker.data.groups import numbered_subjects
from tessera.worker.model.forward import IGNORED
from tessera.worker.privacy.disclosed_counts import CellTable, SubjectTables

AT_ONCE = 1000
"""Number of examples to read at a time, and between two calls of `check`."""
MASK = "attention_mask"

Entries = tuple[Array, Array]
"""The examples of a table's entries and their cells, int64 [entries] each."""


def subject_tables(dataset: Dataset, check: Callable[[], None] = lambda: None) -> SubjectTables:
    """Return the subjects of a data set and the tables that count them, of held-out examples too.

    Raises DataError and the exceptions of `check`.
    """
    parts = [part for part in (dataset, dataset.held_out) if part]
    contents = [content for part in parts for content in _contents(part, check)]
    names = [name for part in parts for name in part.groups or [b""] * part.examples]
    subjects, distinct = numbered_subjects(names)
    unknown = dataset.report.unknown_tokens
    return SubjectTables(
        subjects,
        _digests(distinct, subjects, contents),
        dict(_tables(parts, check)),
        None if unknown is None else max(share for share in UNKNOWN_SHARES if share <= unknown),
    )


def _digests(names: Sequence[bytes | int], subjects: Array, contents: Sequence[bytes]) -> Array:
    """Return a digest of each subject's name and one of its examples, uint64 [subjects, 2]. A subject without a name
    is named by its example, and by how many others are like it."""
    order = np.argsort(subjects, kind="stable")
    ends = np.cumsum(np.bincount(subjects, minlength=len(names))).tolist()
    digests, alike = np.empty((len(names), 2), np.uint64), Counter[bytes]()
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        content, name = b"".join(sorted(contents[place] for place in order[begin:end])), names[number]
        alike[content] += 1
        named = name if isinstance(name, bytes) else content + bytes([0]) + str(alike[content]).encode()
        digests[number] = _number(named), _number(content)
    return digests


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def _contents(part: Dataset, check: Callable[[], None]) -> Iterator[bytes]:
    """Yield a digest of everything that the tables count of each example, and of the example itself."""
    labels = part.tensors.get(LABELS)
    for place, identity in enumerate(part.identities(torch.float64, unreadable=b"")):
        if place % AT_ONCE == 0:
            check()
        label = b"" if labels is None else labels[place].contiguous().numpy().tobytes()
        tags = str(list(part.texts.tags[place])).encode() if part.texts and len(part.texts.tags) else b""
        yield hashlib.sha256(b"\0".join([identity, label, tags])).digest()


def _tables(parts: Sequence[Dataset], check: Callable[[], None]) -> Iterator[tuple[TableName, CellTable]]:
    """Yield the tables of a data set. A class that is in no settings is a number."""
    found: dict[TableName, list[Entries]] = {}
    begin = 0
    for part in parts:
        for name, (examples, cells) in _entries(part, check):
            found.setdefault(name, []).append((begin + examples, cells))
        begin += part.examples
    for name, pieces in found.items():
        examples, cells = (np.concatenate(each) for each in zip(*pieces, strict=True))
        size = BINS
        if name == "classes":
            size = parts[0].schema.classes or int(cells.max(initial=-1)) + 1
        if size <= MAX_CLASSES:
            yield name, CellTable(examples, cells, size)


def _entries(part: Dataset, check: Callable[[], None]) -> Iterator[tuple[TableName, Entries]]:
    every, texts = np.arange(part.examples), part.texts
    if part.classes is not None:
        yield "classes", (every, part.classes.numpy())
    if part.schema.problem == "multi_label":
        yield "classes", tuple(np.asarray(part.tensors[LABELS].nonzero()).T)
    if part.sides is not None:
        yield "pixels", (every, _bins(part.sides))
    if texts and not texts.of_classes:
        yield "words", (every, _bins(_words(texts)))
        if len(texts.tags):
            yield "classes", _of_each(map(set, texts.tags))
    elif IDS in part.inputs:
        labelled = part.classes is None and part.schema.classes is not None and part.schema.problem is None
        for rows in torch.split(torch.arange(part.examples), AT_ONCE):
            check()
            inputs = part.read(rows)
            yield "tokens", (rows.numpy(), _bins(_lengths(part, inputs)))
            if labelled:
                places, cells = _of_each(set(row.tolist()) - {IGNORED} for row in inputs[LABELS])
                yield "classes", (rows.numpy()[places], cells)


def _words(texts: RawTexts) -> Array:
    return np.array([sum(len(piece.split()) for piece in text) for text in texts.parts()], np.int64)


def _lengths(part: Dataset, inputs: dict[str, Tensor]) -> Array:
    if MASK in inputs:
        # Of both texts of a pair.
        return np.asarray(inputs[MASK].flatten(1).sum(dim=1))
    ids = inputs[IDS]
    padded = part.padding.values.get(IDS) if part.padding else None
    return np.full(len(ids), ids.shape[1]) if padded is None else np.asarray(ids.ne(padded).sum(dim=1))


def _of_each(sets: Iterator[set[int]]) -> Entries:
    pairs = [(place, cell) for place, cells in enumerate(sets) for cell in sorted(cells)]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _bins(sizes: Array) -> Array:
    """Return the bin of each size, int64 [sizes]."""
    return np.asarray(np.log2(np.maximum(sizes, 1)).astype(np.int64).clip(max=BINS - 1))
