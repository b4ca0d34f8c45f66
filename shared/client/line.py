"""The rate of the line to the coordinator, measured while bytes move."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

TRANSFERS_KEPT = 5

MEASURED_BYTES = 1 << 20
"""The smallest transfer that is measured: a smaller one shows the latency of its request."""

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class ThreadTimes:
    """Seconds of one thread: all that have passed, those in which it computed, and those in which it was ready to
    compute and waited for a processor."""

    passed: float
    computed: float
    queued: float

    @classmethod
    def now(cls) -> Self:
        """Return the calling thread's times so far. Where the system does not report it, `queued` is 0."""
        queued = 0.0
        with suppress(OSError, ValueError, IndexError):
            queued = int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
        return cls(time.monotonic(), time.thread_time(), queued)

    def since(self, before: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(
            self.passed - before.passed, self.computed - before.computed, max(0.0, self.queued - before.queued)
        )

    @property
    def blocked(self) -> float:
        """Seconds in which the thread waited for anything but a processor."""
        return max(0.0, self.passed - self.computed - self.queued)

    @property
    def contention(self) -> float:
        """Seconds that a second of computing takes, beside the other processes of the machine."""
        return 1.0 + self.queued / self.computed if self.computed > 0 else 1.0


class LineRate:
    """The time that a line takes for a byte in one direction, by the latest transfers."""

    def __init__(self) -> None:
        self._found: deque[float] = deque(maxlen=TRANSFERS_KEPT)

    @property
    def seconds_per_byte(self) -> float | None:
        """The median of the latest transfers; None before the first one."""
        return median(self._found) if self._found else None

    def note(self, nbytes: int, times: ThreadTimes, peer_waited: float | None = None) -> None:
        """Note a transfer by the times of the thread that moved the bytes. `peer_waited` are the seconds in which the
        other end waited for bytes, if it reports them."""
        if nbytes < MEASURED_BYTES:
            return
        # The line is the limit while both ends wait: at least for as long as their waits must overlap.
        idle = 0.0 if peer_waited is None else times.passed - min(max(peer_waited, 0.0), times.passed)
        self._found.append(max(0.0, times.blocked - idle) / nbytes)

    @contextmanager
    def measuring(self, position: Callable[[], int]) -> Iterator[None]:
        """Note the bytes by which `position` grows within the block, unless it raises."""
        start, before = position(), ThreadTimes.now()
        yield
        self.note(position() - start, ThreadTimes.now().since(before))


def reported_seconds(header: str | None) -> float | None:
    """Return the seconds in a header of an answer; None if it has no finite number."""
    with suppress(TypeError, ValueError):
        seconds = float(header)  # type: ignore[arg-type]
        return seconds if math.isfinite(seconds) else None
    return None
