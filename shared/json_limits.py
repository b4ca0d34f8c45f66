"""JSON from a peer: counted in its bytes before it is parsed, and parsed strictly."""

import json
import re
from math import isfinite
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)

MAX_VALUES = 1 << 22
"""Tokenizers of published models take half of it. Each value may take tens of times its bytes once it is parsed."""

DOCUMENT_VALUES = 1 << 20
"""More than a table of the most blocks takes, or its manifest with two moments of each block, or an answer."""

MAX_ERRORS = 1_000
"""Errors of a document that are reported one by one: to write one down takes a hundred times its bytes."""

_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


def count_values(raw: bytes) -> int:
    """Return a number that the values of a JSON document do not exceed, without parsing it."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def bounded(raw: bytes, most_values: int = DOCUMENT_VALUES) -> bytes:
    """Return a JSON document unchanged. Raises ValueError if it has more values than that."""
    if count_values(raw) > most_values:
        raise ValueError(f"a document of more than {most_values} values")
    return raw


def check_document(raw: bytes, most_values: int = MAX_VALUES) -> Any:
    """Return the content of a JSON document. Refuse one of too many values, with two values under one name, with a
    number that is not finite or with half of a surrogate pair.

    Raises ValueError.
    """
    try:
        # Decoded here, because `json` would take other encodings too.
        text = bounded(raw, most_values).decode()
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("a document nested too deep") from None
    if _SURROGATE.search(raw):
        # Raises UnicodeEncodeError, which is a ValueError.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_document(kind: type[M], raw: bytes) -> M:
    """Return a document of blocks, whose entries are counted before one is made. Raises ValidationError, and
    ValueError for one that is refused before that or has too many errors."""
    document = check_document(raw, DOCUMENT_VALUES)
    for name, field in kind.model_fields.items() if isinstance(document, dict) else ():
        entries, limits = document.get(name), [getattr(each, "max_length", None) for each in field.metadata]
        most = next(filter(None, limits), None)
        if most and isinstance(entries, dict | list) and len(entries) > most:
            raise ValueError(f"a document with {len(entries)} {name}; at most {most} are read")
    try:
        return kind.model_validate(document)
    except ValidationError as refusal:
        if (count := refusal.error_count()) > MAX_ERRORS:
            raise ValueError(f"a document with {count} errors") from None
        raise


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a document that names something twice")
    return table


def _finite(written: str) -> float:
    if not isfinite(number := float(written)):
        raise ValueError("a document with a number that is not finite")
    return number
