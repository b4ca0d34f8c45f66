"""Memory of a token's responses in progress.

A receiver that reads nothing keeps the bytes read for it in memory until its connection is closed.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.shared.problems import TooManyRequests

HELD_BYTES = 2 << 20
"""Most bytes of a response in memory: the piece being sent and the next one."""

RETRY_SECONDS = 1.0


class ResponseMemory:
    """Memory of the responses with blobs that this process sends, by token."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def reserve(self, token_id: str, length: int) -> Iterator[None]:
        """Reserve memory for a response of `length` bytes while it is sent. Raise TooManyRequests."""
        held = min(length, HELD_BYTES)
        with self._lock:
            if self._held[token_id] + held > self._most:
                raise TooManyRequests(
                    "too many responses with blobs are in progress for this token (setting response_bytes_per_token)",
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
