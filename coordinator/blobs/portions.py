"""Responses with several blobs, in portions that take little memory to read."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tessera.shared.problems import NotFound
from tessera.shared.rounds.blob_store import StoredBlob

STREAM_BYTES = 1 << 20
"""Bytes read and sent at a time; each piece takes a thread, and perhaps a request to the store."""


@dataclass(frozen=True)
class Portion:
    """Part of a response with several blobs: several small ones, or one large one."""

    blobs: tuple[StoredBlob, ...]
    inline: bool

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.blobs)


def cut(portions: Iterable[Portion], start: int, stop: int) -> Iterator[tuple[Portion, int, int]]:
    """Yield the portions that bytes `start` to `stop` of all of them lie in, with the part of each."""
    for portion in portions:
        first, last = max(0, start), min(portion.size, stop)
        if first < last:
            yield portion, first, last
        start, stop = start - portion.size, stop - portion.size


def require_all(digests: Iterable[str], found: Collection[str]) -> None:
    """Raise NotFound for a digest that was not found."""
    for digest in digests:
        if digest not in found:
            raise NotFound(f"there is no blob {digest}")


class InlineReader:
    """Reads portions of small blobs, and the next ones in the same query: in a model they stand among large ones."""

    def __init__(self, portions: Sequence[Portion], read: Callable[[Portion], bytes]) -> None:
        self._portions, self._read = portions, read
        self._held: dict[Portion, bytes] = {}

    def read(self, portion: Portion) -> bytes:
        if portion not in self._held:
            these, size = [portion], portion.size
            for each in self._portions[self._portions.index(portion) + 1 :]:
                if each.inline and size + each.size <= STREAM_BYTES:
                    these.append(each)
                    size += each.size
            data = self._read(Portion(tuple(blob for each in these for blob in each.blobs), inline=True))
            stops = accumulate(each.size for each in these)
            self._held = {each: data[stop - each.size : stop] for each, stop in zip(these, stops, strict=True)}
        return self._held[portion]
