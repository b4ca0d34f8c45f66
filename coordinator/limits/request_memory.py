"""Memory of the requests in progress, by those who cause it.

A sender that stops within a body, and a receiver that reads nothing, keep bytes in memory until they are cut off.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tessera.shared.problems import Busy, TooManyRequests
from tessera.shared.urls import networks_of

RESPONSE_BYTES = 1 << 30
"""Maximum memory of the responses with blobs that a token receives at once."""

HELD_BYTES = 2 << 20
"""Most bytes of a response in memory: the piece being sent and the next one."""

BODY_BYTES = 4 << 10
"""Least memory of a body: a request in progress costs as much."""

STRANGERS = 16
"""Callers without a token share a sixteenth of the memory of bodies."""

ADDRESS = 8
"""An address has an eighth of these."""

RETRY_SECONDS = 1.0


class MemoryShares:
    """Bytes in memory by name. A holder may have several names, each with a limit of its own."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def reserving(self, limits: Mapping[str, int]) -> Iterator[Callable[[int], bool]]:
        """Yield a function that reserves more bytes until the end, and returns True if they are within all limits."""
        held = 0

        def reserve(count: int) -> bool:
            nonlocal held
            with self._lock:
                if any(self._held[name] + count > most for name, most in limits.items()):
                    return False
                held += count
                self._held.update(dict.fromkeys(limits, count))
                return True

        try:
            yield reserve
        finally:
            with self._lock:
                for name in limits:
                    self._held[name] -= held
                    if not self._held[name]:
                        del self._held[name]


class ResponseMemory(MemoryShares):
    """Memory of the responses with blobs that this process sends, by token."""

    @contextmanager
    def reserve(self, token_id: str, length: int) -> Iterator[None]:
        """Reserve memory for a response of `length` bytes while it is sent. Raise TooManyRequests."""
        with self.reserving({token_id: RESPONSE_BYTES}) as reserve:
            if not reserve(min(length, HELD_BYTES)):
                raise TooManyRequests(
                    "too many responses with blobs are in progress for this token",
                    remedy="Wait as long as Retry-After says, and read fewer blobs at a time.",
                    retry_after_seconds=RETRY_SECONDS,
                )
            yield


class BodyMemory(MemoryShares):
    """Memory of the bodies of requests in progress: of this process, of each site, other token and person, of all
    callers without a token, and of each address of theirs."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most = most_bytes

    @contextmanager
    def receive(self, owner: str | None, address: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of a body until its request ends, and raises Busy. `owner` is the
        caller's, or None without a token."""
        strangers = self._most // STRANGERS
        limits = {"": self._most}
        if owner:
            limits[owner] = self._most // 2
        else:
            limits |= {"strangers": strangers, f"address:{networks_of(address)[0]}": strangers // ADDRESS}
        held, received = 0, 0
        with self.reserving(limits) as reserve:

            def count(number: int) -> None:
                nonlocal held, received
                received += number
                wanted = max(received, BODY_BYTES)
                if not reserve(wanted - held):
                    raise Busy(
                        "too many bodies of requests are in progress: of your site, token or address, or of all "
                        "callers (setting body_memory_bytes)",
                        retry_after_seconds=RETRY_SECONDS,
                    )
                held = wanted

            yield count
