"""The conductor's wakeups, by calls and at every tick, and the file that shows that it is alive."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

log = structlog.get_logger()

MAX_REST_SECONDS = 0.1
"""The longest time from a look to the next one that a call asks for."""


@dataclass(eq=False)
class ConductorWakeups:
    """The runs to look at, from `call` and from the clock, until `end`."""

    tick_seconds: float
    heartbeat_file: Path
    ended: threading.Event = field(default_factory=threading.Event)
    _called: threading.Event = field(default_factory=threading.Event)
    # The runs that were named since the last look; None for all.
    _named: set[str] | None = field(default_factory=set)
    _naming: threading.Lock = field(default_factory=threading.Lock)

    def call(self, *run_ids: str) -> None:
        """Wake the loop: look at these runs, or at all if none is named, at once rather than at the next tick."""
        with self._naming:
            self._named = {*self._named, *run_ids} if run_ids and self._named is not None else None
        self._called.set()

    def end(self) -> None:
        """Yield no more looks."""
        self.ended.set()
        self._called.set()

    def looks(self) -> Iterator[set[str] | None]:
        """Yield the runs of each look, None for all, as soon as there is one, until `end`.

        After a look the loop rests for as long as that took. So the looks at a large cohort, of which each worker may
        cause one, take half of the time at most.
        """
        due_at = time.monotonic() + self.tick_seconds
        rests_until = 0.0
        while not self.ended.is_set():
            self._called.wait(max(0.0, due_at - time.monotonic()))
            if (rest := min(rests_until, due_at) - time.monotonic()) > 0:
                self.ended.wait(rest)
            self._called.clear()
            with self._naming:
                named, self._named = self._named, set()
            # However many wakeups come between two ticks.
            if named is None or time.monotonic() >= due_at:
                named, due_at = None, time.monotonic() + self.tick_seconds
            # Also while the database is away.
            self.show_alive()
            began = time.monotonic()
            yield named
            ended = time.monotonic()
            rests_until = ended + min(ended - began, MAX_REST_SECONDS)

    def show_alive(self) -> None:
        """Touch the heartbeat file."""
        try:
            self.heartbeat_file.touch()
        except OSError as fault:
            log.warning("conductor.heartbeat_failed", detail=str(fault))
