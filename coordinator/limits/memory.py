"""Limits on memory: of the process, and of the answers to one token that are under way."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.shared.host_memory import CGROUPS, MEMBERSHIP, groups
from tessera.shared.problems import Busy, TooManyRequests

WATERMARK = 0.85
RETRY_SECONDS = 10.0
FRESH_SECONDS = 1.0


class Memory:
    """This process's memory against the limit that is set, else that of the control groups that it is in.

    Near the limit nothing new is begun: a process that crosses it is killed without a word.
    """

    def __init__(self, limit_bytes: int | None, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> None:
        self._limit_bytes = limit_bytes
        self._groups = [] if limit_bytes else groups(cgroups, membership)
        self._lock = threading.Lock()
        self._share = 0.0
        self._looked_at = float("-inf")

    def share(self) -> float:
        """Return how much of the limit is used, 0 without one; as it was a second ago at most."""
        with self._lock:
            if time.monotonic() - self._looked_at > FRESH_SECONDS:
                self._share = self._measure()
                self._looked_at = time.monotonic()
            return self._share

    def require(self) -> None:
        """Raise Busy if there is too little left to begin anything."""
        if (share := self.share()) > WATERMARK:
            raise Busy(f"{share:.0%} of the coordinator's memory is in use", retry_after_seconds=RETRY_SECONDS)

    def _measure(self) -> float:
        if self._limit_bytes:
            return _own_bytes() / self._limit_bytes
        return max((used_bytes(group) / limit for group, limit in self._groups), default=0.0)


def used_bytes(group: Path) -> int:
    """Return what a group uses, without the cached pages of files, which it gives back."""
    used = next(group / name for name in ("memory.current", "memory.usage_in_bytes") if (group / name).exists())
    cached = re.findall(r"^(?:total_)?(?:in)?active_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    # Version 1 tells each twice: of the group alone, and with what is below it.
    return int(used.read_text()) - sum(map(int, cached[-2:]))


def _own_bytes() -> int:
    """Return what this process holds, without the pages of files that it has mapped."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


HELD_BYTES = 2 << 20
"""What an answer holds at most: the piece that is being sent and the next one."""

ANSWER_RETRY_SECONDS = 1.0


class Answers:
    """The answers with blobs that are under way at this process, by token.

    A receiver that takes nothing keeps what was read for it until its connection is cut.
    """

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
                    "too many answers with blobs are under way for this token (setting answer_bytes_per_token)",
                    remedy="Wait as long as Retry-After says, and read fewer blobs at a time.",
                    retry_after_seconds=ANSWER_RETRY_SECONDS,
                )
            self._held[token_id] += held
        try:
            yield
        finally:
            with self._lock:
                self._held[token_id] -= held
                if not self._held[token_id]:
                    del self._held[token_id]
