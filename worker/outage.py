"""Waits for a coordinator that does not answer, and refusals that no wait ends."""

import time

import structlog

from tessera.shared.problems import Forbidden, Invalid, NameInUse, Problem, SiteSuspended, Unauthenticated
from tessera.worker.task.heartbeat import Stop

MAX_PAUSE_SECONDS = 30.0
COMPLAINT_SECONDS = 60.0

MAX_WAIT_SECONDS = 600.0
"""Upper limit on `Retry-After`: a worker that is asked to return in a year asks again after this time."""


class Outage:
    """Increasing waits while the coordinator is unavailable, logged once a minute or when the reason changes."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
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
            more = {"remedy": problem.advice} if self._waited_for_name else {}
            self._log.warning(event, reason=problem.code, detail=problem.detail, errors=faults, **more)
        asked = min(problem.retry_after_seconds or 0, MAX_WAIT_SECONDS)
        self._stop.sleep(max(self._pause_seconds, asked))
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    def over(self) -> None:
        if self._said_at is not None:
            self._log.info("coordinator-back")
        self._said_at, self._pause_seconds, self._waited_for_name = None, 1.0, False


def refuses_worker(problem: Problem) -> bool:
    """Return whether the coordinator refuses this worker for good: its token, or its claim.

    Other refusals may pass, such as the suspension of its site. Only a coordinator's document is a refusal.
    """
    is_lasting = isinstance(problem, Unauthenticated | Forbidden | Invalid) and not isinstance(problem, SiteSuspended)
    return is_lasting and problem.from_document
