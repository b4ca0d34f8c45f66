"""The coordinator's audit chain: how the coordinator writes it and readers verify it."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tessera.shared.api.admin import AuditEntry

GENESIS = "0" * 64
"""The digest before the first entry, which that entry names."""


def link(previous: str, entry: dict[str, Any]) -> str:
    """Return the digest of an entry behind the entry whose digest is `previous`."""
    text = json.dumps([previous, entry], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def mapped(change: Callable[[str], str], value: Any) -> Any:
    """Return a JSON document with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: mapped(change, each) for name, each in value.items()}
    return [mapped(change, each) for each in value] if isinstance(value, list | tuple) else value


def named(names: Mapping[str, str], entry: AuditEntry) -> AuditEntry:
    """Return an entry for people, with the names behind its pseudonyms. Only the entry itself fits into the chain."""
    actor, detail = mapped(
        lambda text: _PSEUDONYM.sub(lambda match: names.get(match[0], match[0]), text), [entry.actor, entry.detail]
    )
    return entry.model_copy(update={"actor": actor, "detail": detail})


_PSEUDONYM = re.compile(r"site-[0-9a-f]{16}(?:/[0-9a-f]{12})?")


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
