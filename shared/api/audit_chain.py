"""The coordinator's audit chain: how the coordinator writes it and readers verify it."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from tessera.shared.api.admin import AuditEntry

GENESIS = "0" * 64
"""The digest before the first entry, which that entry names."""


def link(previous: str, entry: dict[str, Any]) -> str:
    """Return the digest of an entry behind the entry whose digest is `previous`."""
    text = json.dumps([previous, entry], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def first_broken(entries: Iterable[AuditEntry]) -> int | None:
    """Return the number of the first entry that differs from the chain, or None if the chain holds."""
    digest = GENESIS
    for number, shown in enumerate(entries, start=1):
        entry = {
            "seq": shown.seq,
            "at": round(shown.at.timestamp(), 6),
            "actor": shown.actor,
            "action": shown.action,
            "subject": shown.subject,
            "run_id": shown.run,
            "detail": shown.detail,
        }
        if (shown.seq, shown.previous, shown.digest) != (number, digest, link(digest, entry)):
            return number
        digest = shown.digest
    return None
