"""Threads that sites share for work that takes long: each has its turn, however much another asks for."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")


class Shares:
    """A pool of threads. One owner has at most half of them at a time, and who waits is served in turns, by owner.

    For any thread and event loop.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._threads = threads
        self._each = max(1, threads // 2)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = Lock()
        self._working: Counter[str] = Counter()
        # By owner, the one whose turn is next first.
        self._waiting: OrderedDict[str, deque[Future[None]]] = OrderedDict()

    async def run(self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work in a thread when it is the owner's turn, and returns what comes of it."""
        async with self._turn(owner):
            inside = partial(copy_context().run, work, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, inside)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False)

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        granted: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(granted)
            self._grant()
        try:
            await asyncio.wrap_future(granted)
        except asyncio.CancelledError:
            # It may have been granted at the same moment.
            if not granted.cancelled():
                self._give_back(owner)
            raise
        try:
            yield
        finally:
            self._give_back(owner)

    def _give_back(self, owner: str) -> None:
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


class OneAtATime:
    """A lock for each name, for one event loop: who does the same waits, and holds no thread meanwhile."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def at(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            yield
