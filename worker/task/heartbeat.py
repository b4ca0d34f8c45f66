"""What may end a task early: a lease that is lost, and a wish to stop. Both are looked at between batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from tessera.shared.api.tasks import Lease
from tessera.shared.problems import LeaseLost, Problem

T = TypeVar("T")

BEATS_PER_LEASE = 4
GOODBYE_SECONDS = 1.0


class Stopped(Exception):
    """The worker was asked to stop."""


class Stop:
    """A wish that the worker end, which another thread or a signal handler may express at any moment.

    One thread at a time waits on it. It is a queue rather than an event because `Event.set` in a signal handler can
    deadlock with the `Event.wait` that it interrupted; `SimpleQueue.put` may be called anywhere.
    """

    def __init__(self) -> None:
        self.requested = False
        self._inbox: SimpleQueue[_Call[Any] | None] = SimpleQueue()

    def request(self) -> None:
        self.requested = True
        self._inbox.put(None)

    def check(self) -> None:
        """Raise Stopped if asked to stop."""
        if self.requested:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait. Raise Stopped as soon as the worker is asked to stop."""
        try:
            self._inbox.get(timeout=seconds)
        except Empty:
            return
        finally:
            self.check()

    def interruptible(self, blocking: Callable[[], T], too_late: Callable[[T], object]) -> T:
        """Return the result of a call that may block for long. Raises Stopped as soon as asked to stop, and Problem.

        The call goes on in a daemon thread then; a result that it still comes to is handed to `too_late`.
        """
        self.check()
        call = _Call(blocking, too_late, self._inbox)
        call.start()
        if self._inbox.get() is None:
            call.abandon()
            raise Stopped
        if call.problem:
            raise call.problem
        if not call.results:
            raise RuntimeError("the call ended without a result; its thread has reported why")
        return call.results[0]


class _Call(Thread, Generic[T]):
    """A call in a thread of its own, whose result is either waited for or, once abandoned, disposed of."""

    def __init__(
        self,
        blocking: Callable[[], T],
        too_late: Callable[[T], object],
        inbox: SimpleQueue[_Call[Any] | None],
    ) -> None:
        super().__init__(name="call", daemon=True)
        self.results: list[T] = []
        self.problem: Problem | None = None
        self._blocking = blocking
        self._too_late = too_late
        self._inbox = inbox
        self._lock = Lock()
        self._abandoned = False

    def run(self) -> None:
        try:
            result = self._blocking()
        except Problem as problem:
            self.problem = problem
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
    """Keeps a lease while the block lasts, from a thread of its own.

    `heartbeat` renews it once and may raise Problem. A lease that could not be renewed for as long as it is given,
    and at most for `max_lease_seconds`, counts as lost, by `clock`, from which only durations are taken: the
    coordinator's time of day is its own.
    """

    def __init__(
        self,
        heartbeat: Callable[[], Lease],
        lease_seconds: float,
        max_lease_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = heartbeat
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
        # A heartbeat on its way to a coordinator that does not answer is left behind: it can only be refused.
        self._thread.join(GOODBYE_SECONDS)

    def check(self) -> None:
        """Raise the problem that ended the lease: LeaseLost, TaskCancelled, RoundClosed, or one of the token."""
        if self._problem:
            raise self._problem
        if self._clock() - self._renewed_at > self._lease_seconds:
            raise LeaseLost(f"the lease could not be renewed for {self._lease_seconds:g} s")

    def _beat(self) -> None:
        try:
            self._renew()
        except Problem as problem:
            self._problem = problem
        except Exception as fault:  # noqa: BLE001  (whatever it was, nothing renews the lease any more)
            self._problem = LeaseLost(f"the lease is not renewed any more: {fault!r}")

    def _renew(self) -> None:
        """Renew the lease until the block ends. Raises what makes an end of it before."""
        while not self._done.wait(self._lease_seconds / BEATS_PER_LEASE):
            # A lease runs at the latest from when its renewal was asked for.
            asked_at = self._clock()
            try:
                self._lease_seconds = min(self._heartbeat().lease_seconds, self._max_lease_seconds)
                self._renewed_at = asked_at
            except Problem as problem:
                if not problem.retryable:
                    raise
