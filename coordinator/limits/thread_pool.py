"""A thread pool that is fair to its owners, and locks by name."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")


class FairThreadPool:
    """A thread pool for long work of several owners: each uses at most half of the threads, and they take turns.

    Safe to use from any thread and event loop.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._threads = threads
        self._each = max(1, threads // 2)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = Lock()
        self._working: Counter[str] = Counter()
        # By owner, in the order of their turns.
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    async def run(self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work in a thread when it is the owner's turn, and return its result."""
        granted: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(granted)
            self._grant()
        try:
            await asyncio.wrap_future(granted)
            inside = partial(copy_context().run, work, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, inside)
        finally:
            # A caller that is cancelled may have been granted its turn at the same moment.
            if not granted.cancelled():
                self._release(owner)

    async def run_to_end(self, owner: str, work: Callable[[], T]) -> T:
        """Run work as `run` does, and wait for it even when cancelled, because it uses the caller's data."""
        task = asyncio.ensure_future(self.run(owner, work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _release(self, owner: str) -> None:
        with self._lock:
            self._working[owner] -= 1
            if not self._working[owner]:
                del self._working[owner]
            self._grant()

    def _grant(self) -> None:
        while self._working.total() < self._threads:
            owner = next((owner for owner in self._waiting if self._working[owner] < self._each), None)
            if owner is None:
                return
            granted = self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            if granted.set_running_or_notify_cancel():
                self._working[owner] += 1
                granted.set_result(None)


class KeyedLocks:
    """A lock for each name in one event loop: waiting for it takes no thread."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def hold(self, name: str) -> asyncio.Lock:
        """Return the lock of this name, for `async with`."""
        return self._locks.setdefault(name, asyncio.Lock())
