"""Waits for a coordinator that does not answer, and refusals that no wait ends."""

import time
from collections.abc import Callable

import structlog

from tessera.shared.problems import Forbidden, Invalid, NameInUse, Problem, SiteSuspended, Unauthenticated
from tessera.worker.task.heartbeat import ALIVE_SECONDS, Stop

MAX_PAUSE_SECONDS = 30.0
COMPLAINT_SECONDS = 60.0

MAX_WAIT_SECONDS = 600.0
"""Upper limit on `Retry-After`: a worker that is asked to return in a year asks again after this time."""

MISMATCH_SECONDS = 3600.0
"""Time between two claims of a worker whose protocol the coordinator does not speak: either may be upgraded."""


class Outage:
    """Increasing waits while the coordinator is unavailable, logged once a minute or when the reason changes.

    `alive` is called during the waits, every ALIVE_SECONDS.
    """

    def __init__(self, stop: Stop, alive: Callable[[], None] = lambda: None) -> None:
        self._stop = stop
        self._alive = alive
        self._log = structlog.get_logger("worker")
        self._pause_seconds = 1.0
        self._said_at: float | None = None
        self._said = ""
        self._waited_for_name = False

    def wait(self, problem: Problem) -> None:
        """Wait before the next claim. Raise NameInUse if the other worker of this name goes on calling.

        The other may be this worker's own past, such as a container whose state folder ended with it.
        """
        if isinstance(problem, NameInUse) and self._waited_for_name:
            raise problem
        self._waited_for_name = isinstance(problem, NameInUse)
        now = time.monotonic()
        if self._said_at is None or str(problem) != self._said or now - self._said_at >= COMPLAINT_SECONDS:
            self._said_at, self._said = now, str(problem)
            faults = [str(fault) for fault in problem.errors]
            event = "name-in-use" if self._waited_for_name else "coordinator-away"
            event = "protocol-mismatch" if is_mismatch(problem) else event
            about = {"reason": problem.code, "detail": problem.detail, "errors": faults, "remedy": problem.advice}
            self._log.warning(event, **about)
        asked = min(problem.retry_after_seconds or 0, MAX_WAIT_SECONDS)
        left = MISMATCH_SECONDS if is_mismatch(problem) else max(self._pause_seconds, asked)
        while left > 0:
            self._alive()
            self._stop.sleep(min(left, ALIVE_SECONDS))
            left -= ALIVE_SECONDS
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    def over(self) -> None:
        if self._said_at is not None:
            self._log.info("coordinator-back")
        self._said_at, self._pause_seconds, self._waited_for_name = None, 1.0, False


def refuses_worker(problem: Problem) -> bool:
    """Return True if the coordinator refuses this worker for good: its token, or its claim.

    Other refusals may pass, such as the suspension of its site. Only a coordinator's document is a refusal.
    """
    is_lasting = isinstance(problem, Unauthenticated | Forbidden | Invalid) and not isinstance(problem, SiteSuspended)
    return is_lasting and problem.from_document and not is_mismatch(problem)


def is_mismatch(problem: Problem) -> bool:
    """Return True if the coordinator speaks another protocol than this worker."""
    return isinstance(problem, Invalid) and any(fault.pointer == "/protocol_max" for fault in problem.errors)
