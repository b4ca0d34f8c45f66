"""How much memory the answers of one token may take while they are under way.

A receiver that takes nothing keeps what was read for it until its connection is cut.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.shared.problems import TooManyRequests

HELD_BYTES = 2 << 20
"""What an answer holds at most: the piece that is being sent and the next one."""

RETRY_SECONDS = 1.0


class Answers:
    """The answers with blobs that are under way at this process, by token."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def under_way(self, token_id: str, length: int) -> Iterator[None]:
        """Count one more answer of `length` bytes while it lasts. Raises TooManyRequests."""
        held = min(length, HELD_BYTES)
        with self._lock:
            if self._held[token_id] + held > self._most:
                raise TooManyRequests(
                    "too many answers with blobs are under way for this token (setting response_bytes_per_token)",
                    remedy="Wait as long as Retry-After says, and read fewer blobs at a time.",
                    retry_after_seconds=RETRY_SECONDS,
                )
            self._held[token_id] += held
        try:
            yield
        finally:
            with self._lock:
                self._held[token_id] -= held
                if not self._held[token_id]:
                    del self._held[token_id]
