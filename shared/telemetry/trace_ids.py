"""Trace ids: one name for all that is done for one purpose, in whichever process (W3C Trace Context).

A round has a trace that follows from its run and its number, so that conductor, workers and whoever reads their logs
agree on it without telling each other.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Literal

HEADER = "traceparent"

# Version 00 ends after the flags; a later one may go on.
_WRITTEN = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")


def new_trace() -> str:
    """Return a trace id of 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def traceparent(trace: str) -> str:
    """Return the header that says that a request belongs to a trace."""
    return f"00-{trace}-{secrets.token_hex(8)}-01"


def traceparent_of(run: str, number: int) -> str:
    """Return the header that says that something is done for a round, or to measure the version that it made. Its
    parent is the round itself."""
    digest = hashlib.sha256(f"{run}/{number}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def trace_of(run: str, number: int) -> str:
    """Return the trace of a round."""
    return traceparent_of(run, number)[3:35]


def trace_in(header: str) -> str | None:
    """Return the trace id of a header; None if it has none that is valid."""
    found = _WRITTEN.fullmatch(header)
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    return found["trace"] if found["trace"].strip("0") else None


Kind = Literal["internal", "client", "server"]
Attributes = Mapping[str, str | int]
