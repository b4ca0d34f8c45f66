"""Entities that a table gives as spans of characters, as classes of words.

A text is divided into words and signs, and each has a class in the scheme IOB2 (Tjong Kim Sang and Veenstra 1999,
EACL): `B-` and the entity's type at its first word, `I-` and the type at its others, and `O` outside of entities.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tessera.worker.data.cells import Cells
from tessera.worker.data.readers.tables import DataTable
from tessera.worker.errors import DataError

WORD = re.compile(r"\w+|[^\w\s]")
OUTSIDE = "O"


def words_and_tags(table: DataTable, text: str, label: str) -> tuple[Cells[list[str]], Cells[list[str]]]:
    """Return the words of each text, and the class of each word.

    Reading raises DataError, naming the row, for spans that are no list of records with `start`, `end` and `label`,
    that overlap, that are empty or outside of the text, or that begin or end within a word.
    """
    texts, spans = table.texts("text", text), table.cells("label", label)

    def read(rows: NDArray[Any]) -> list[tuple[list[str], list[str]]]:
        cells = zip(rows.tolist(), texts.read(rows), spans.read(rows), strict=True)
        return [_tagged(f"label: row {row} of {table.where}", *cell) for row, *cell in cells]

    pairs = Cells(read, texts.rows)
    return pairs.mapped(lambda pair: pair[0]), pairs.mapped(lambda pair: pair[1])


def _tagged(where: str, text: str, cell: object) -> tuple[list[str], list[str]]:
    words = list(WORD.finditer(text))
    tags, last, place = [OUTSIDE] * len(words), 0, 0
    for start, end, label in _spans(where, cell):
        span = f"{where} has a span from {start} to {end}"
        if not 0 <= start < end <= len(text):
            raise DataError(
                f"{span}, which is empty or outside of its {len(text)} characters: count characters from 0, and give "
                "the place after the last one as `end`"
            )
        if start < last:
            raise DataError(f"{span}, which overlaps another: a word is in one entity, so keep one of the two")
        while place < len(words) and words[place].end() <= start:
            place += 1
        first = place
        while place < len(words) and words[place].start() < end:
            tags[place] = f"{'I' if place > first else 'B'}-{label}"
            place += 1
        if place == first:
            raise DataError(f"{span}, which has no word: remove it")
        if words[first].start() < start or words[place - 1].end() > end:
            raise DataError(f"{span}, which begins or ends within a word: let it cover whole words")
        last = end
    return [word[0] for word in words], tags


def _spans(where: str, cell: object) -> Sequence[tuple[int, int, str]]:
    """Return the spans of a cell in their order; in a CSV file they are written as JSON."""
    found = cell
    if isinstance(cell, str):
        try:
            found = json.loads(cell) if cell.strip() else []
        except (ValueError, RecursionError):
            raise DataError(f"{where} has spans that are no JSON, {cell[:40]!r}: {_REMEDY}") from None
    if not isinstance(found, list):
        raise DataError(f"{where} has no list of spans: {_REMEDY}")
    spans: list[tuple[int, int, str]] = []
    for each in found:
        values: list[Any] = [each.get(name) for name in ("start", "end", "label")] if isinstance(each, dict) else []
        if [type(value) for value in values] != [int, int, str]:
            raise DataError(f"{where} has a span {str(each)[:60]!r}: {_REMEDY}")
        spans.append((values[0], values[1], values[2]))
    return sorted(spans)


_REMEDY = 'write [{"start": 3, "end": 9, "label": "drug"}], or [] for a text without entities'
