"""Early ends of a task, checked between batches: a lost lease and a request to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import structlog

from tessera.shared.api.tasks import Lease
from tessera.shared.client.transport import may_pass
from tessera.shared.problems import LeaseLost, Problem
from tessera.shared.schema import MAX_HELD

T = TypeVar("T")

BEATS_PER_LEASE = 4
GOODBYE_SECONDS = 1.0

END_SECONDS = 10.0
"""Time that a stopping worker waits for each thread: it gives its lease back."""

ALIVE_SECONDS = 30.0
"""Longest time between two calls of `alive`, apart from a pending heartbeat."""


class Stopped(Exception):
    """The worker was asked to stop."""


class Stop:
    """A request to stop the worker, which any thread or signal handler may make.

    Only one thread at a time may wait on it. It is a queue rather than an event because `Event.set` in a signal
    handler can deadlock with the `Event.wait` that it interrupted; `SimpleQueue.put` may be called anywhere.
    """

    def __init__(self) -> None:
        self.requested = False
        self._inbox: SimpleQueue[_Call[Any] | None] = SimpleQueue()

    def request(self) -> None:
        self.requested = True
        self._inbox.put(None)

    def check(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self.requested:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep. Raises Stopped as soon as a stop is requested."""
        try:
            self._inbox.get(timeout=seconds)
        except Empty:
            return
        finally:
            self.check()

    def interruptible(self, blocking: Callable[[], T], too_late: Callable[[T], object]) -> T:
        """Return the result of a call that may block for long. Raises the call's own exception; Stopped once a stop
        is requested.

        An abandoned call continues in a daemon thread, which passes its result to `too_late`.
        """
        self.check()
        call = _Call(blocking, too_late, self._inbox)
        call.start()
        if self._inbox.get() is None:
            call.abandon()
            raise Stopped
        if call.fault:
            raise call.fault
        return call.results[0]


class _Call(Thread, Generic[T]):
    """A call in its own thread; the result of an abandoned call is passed to `too_late`."""

    def __init__(
        self, blocking: Callable[[], T], too_late: Callable[[T], object], inbox: SimpleQueue[_Call[Any] | None]
    ) -> None:
        super().__init__(name="call", daemon=True)
        self.results: list[T] = []
        self.fault: Exception | None = None
        self._blocking = blocking
        self._too_late = too_late
        self._inbox = inbox
        self._lock = Lock()
        self._abandoned = False

    def run(self) -> None:
        try:
            result = self._blocking()
        except Exception as fault:  # noqa: BLE001  (the caller decides)
            self.fault = fault
        else:
            with self._lock:
                self.results.append(result)
                late = self._abandoned
            if late:
                self._too_late(result)
        finally:
            self._inbox.put(self)

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            results = list(self.results)
        for result in results:
            self._too_late(result)


class Renewal:
    """Context manager that renews a lease from its own thread.

    `heartbeat` renews the lease once and may raise Problem. The lease is lost when it was not renewed for its
    duration, capped at `max_lease_seconds`. Only durations by `clock` matter, never the coordinator's time of day.
    `alive` is called at each heartbeat, and between two of them every ALIVE_SECONDS.
    """

    def __init__(
        self,
        heartbeat: Callable[[], Lease],
        lease_seconds: float,
        max_lease_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._heartbeat = heartbeat
        self._alive = alive
        self._max_lease_seconds = max_lease_seconds
        self._lease_seconds = min(lease_seconds, max_lease_seconds)
        self._clock = clock
        self._renewed_at = clock()
        self._problem: Problem | None = None
        self._done = Event()
        self._thread = Thread(target=self._beat, name="renewal", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self._done.set()
        # Do not wait longer for a pending heartbeat: its lease no longer matters.
        self._thread.join(GOODBYE_SECONDS)

    def check(self) -> None:
        """Raise the problem that ended the lease: LeaseLost, TaskCancelled, RoundClosed or an auth error."""
        if self._problem:
            raise self._problem
        if self._clock() - self._renewed_at > self._lease_seconds:
            raise LeaseLost(f"the lease could not be renewed for {self._lease_seconds:g} s")

    def _beat(self) -> None:
        try:
            self._renew()
        except Problem as problem:
            self._problem = problem
        except Exception as fault:  # noqa: BLE001  (after any error nothing renews the lease)
            self._problem = LeaseLost(f"renewal of the lease failed: {fault!r}")

    def _renew(self) -> None:
        """Renew the lease until the block ends. Raises Problem if the lease ends first."""
        wait_seconds = self._lease_seconds / BEATS_PER_LEASE
        while not self._done.wait(min(wait_seconds, ALIVE_SECONDS)):
            self._alive()
            wait_seconds -= ALIVE_SECONDS
            if wait_seconds > 0:
                continue
            # Count the lease from the request, the earliest moment at which it can have been renewed.
            asked_at = self._clock()
            try:
                self._lease_seconds = min(self._heartbeat().lease_seconds, self._max_lease_seconds)
                self._renewed_at = asked_at
            except Problem as problem:
                if not may_pass(problem):
                    raise
            wait_seconds = self._lease_seconds / BEATS_PER_LEASE


class ReleaseQueue:
    """The tasks whose updates wait for release: each has a thread that keeps its lease, and then sends the update."""

    def __init__(self) -> None:
        self.sending = Lock()
        """Held by the thread that sends: the site's limits of bandwidth are of one upload at a time."""
        self._ending = Event()
        self._threads: dict[str, Thread] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The ids of the tasks."""
        return tuple(self._threads)

    def full(self) -> str | None:
        """Return the reason why no task may be claimed now, or None."""
        if len(self._threads) < MAX_HELD:
            return None
        return f"{MAX_HELD} updates wait for a release, as many as may: see `tessera worker airlock`"

    def check(self) -> None:
        """Raise Stopped if the worker ends."""
        if self._ending.is_set():
            raise Stopped

    def add(self, task: str, keep: Callable[[], object]) -> None:
        """Call `keep` in a thread of its own. Until it returns, the task is held."""

        def kept() -> None:
            try:
                keep()
            except Stopped:
                pass
            except Exception as fault:  # noqa: BLE001  (the coordinator's refusals end the worker's next claim too)
                structlog.get_logger("worker").exception("held-update-dropped", task=task, cause=type(fault).__name__)
            finally:
                del self._threads[task]

        self._threads[task] = thread = Thread(target=kept, name="held", daemon=True)
        thread.start()

    def end(self) -> None:
        """End all threads. Their updates stay in the airlock, for the next process."""
        self._ending.set()
        for thread in list(self._threads.values()):
            thread.join(END_SECONDS)
