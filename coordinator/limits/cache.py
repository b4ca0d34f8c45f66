"""A bounded cache of the most recently used values."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """The most recently used values under their names, limited in number and in bytes. Safe in any thread."""

    def __init__(self, most: int, most_bytes: int = 0, nbytes_of: Callable[[T], int] = lambda _: 0) -> None:
        self._values: OrderedDict[str, T] = OrderedDict()
        self._most, self._most_bytes, self._nbytes_of = most, most_bytes, nbytes_of
        self._bytes = 0
        self._lock = threading.RLock()

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._values

    def get(self, name: str) -> T | None:
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
            return self._values.get(name)

    def keep(self, name: str, value: T) -> None:
        with self._lock:
            self.drop(name)
            self._values[name] = value
            self._bytes += self._nbytes_of(value)
            while len(self._values) > self._most or self._bytes > self._most_bytes:
                self.drop(next(iter(self._values)))

    def drop(self, name: str) -> None:
        with self._lock:
            if name in self._values:
                self._bytes -= self._nbytes_of(self._values.pop(name))
