"""Pauses after refused and failed tasks, so that no coordinator can make a worker refuse tasks without end."""

import structlog

from tessera.worker.task.heartbeat import Stop

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
"""Below the time after which a coordinator counts a worker as silent."""


class Backoff:
    """Increasing pauses after tasks that failed, were refused or not approved, until one is done.

    Each such task costs the site durable entries in its audit, and the coordinator next to nothing.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def after(self, outcome: str, seconds: float) -> None:
        """Pause after a task that took `seconds`. Raises Stopped."""
        if outcome in ("done", "held"):
            self._pause_seconds = FIRST_PAUSE_SECONDS
        elif outcome == "dropped":
            # A round closes without a late worker also at an honest coordinator, and its next task may be there: only
            # what begins and ends within the same second has to wait for the next one.
            if seconds < FIRST_PAUSE_SECONDS:
                self._stop.sleep(FIRST_PAUSE_SECONDS - seconds)
        else:
            structlog.get_logger("worker").info("paused", outcome=outcome, seconds=self._pause_seconds)
            self._stop.sleep(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
