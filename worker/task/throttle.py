"""Uploads that leave some of the site's line to others."""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE_SECONDS = 0.5


class Throttle:
    """Keeps what is sent to `bytes_per_second` on average, by waiting after each piece for as long as it should have
    taken. `check` is called while it waits, and may raise."""

    def __init__(
        self,
        bytes_per_second: float,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._check = check
        self._clock = clock
        self._sleep = sleep
        self._began_at = clock()
        self._sent_bytes = 0

    def sent(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
        due_at = self._began_at + self._sent_bytes / self._rate
        while (left := due_at - self._clock()) > 0:
            self._sleep(min(left, PAUSE_SECONDS))
            self._check()
