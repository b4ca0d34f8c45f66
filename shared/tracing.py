"""Trace ids: one name for all that is done for one purpose, in whichever process (W3C Trace Context)."""

from __future__ import annotations

import re
import secrets

HEADER = "traceparent"

# Version 00 ends after the flags; a later one may go on.
_WRITTEN = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")


def new_trace() -> str:
    """A trace id of 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def traceparent(trace: str) -> str:
    """The header that says that a request belongs to a trace."""
    return f"00-{trace}-{secrets.token_hex(8)}-01"


def trace_in(header: str) -> str | None:
    """The trace id of a header; None if it has none that is valid."""
    found = _WRITTEN.fullmatch(header)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    return found["trace"] if found["trace"].strip("0") else None
