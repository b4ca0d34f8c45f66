"""Limits on a JSON document from a peer, checked before it is parsed."""

import json
from typing import Any

MAX_VALUES = 1 << 22
"""Far above what a model of the most blocks takes. Each value may take tens of times its bytes once it is read."""


def check_document(raw: bytes) -> Any:
    """Return what a JSON document says. Refuse one that would grow out of all proportion, or that says two things
    under one name.

    Raises ValueError.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise ValueError(f"a document of more than {MAX_VALUES} values")
    try:
        return json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("a document nested too deep") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a document that names something twice")
    return table
