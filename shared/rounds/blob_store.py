"""A place for bytes under their sha-256, as the coordinator has one and a simulation another."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol


@dataclass(frozen=True)
class StoredBlob:
    """A blob whose bytes are safe. `inline` has them where a store keeps few bytes apart from files."""

    digest: str
    size: int
    inline: bytes | None = None
    stamp: str | None = field(default=None, compare=False)
    """The state of its file when its bytes were last known to match the digest, where a store keeps files."""


class Writer(Protocol):
    """Bytes on their way to becoming a blob."""

    def write(self, piece: bytes | memoryview) -> None: ...
    def finish(self) -> StoredBlob:
        """Make the bytes safe under their digest."""
        ...


class Batch(Protocol):
    """Blobs that become safe together."""

    def writer(self) -> AbstractContextManager[Writer]:
        """Open a writer of one blob. Several may be open at a time, in several threads."""
        ...


class BlobStore(Protocol):
    """Storage of blobs by digest. Reading raises NotFound for an unknown digest."""

    def size(self, digest: str) -> int: ...
    def reading_ahead(self, digests: Sequence[str]) -> AbstractContextManager[None]:
        """Return a block in which these blobs are read beside each other, each in many parts."""
        ...

    def expect(self, digests: Collection[str]) -> None:
        """Prefetch blobs that will be read soon, if the store gains by it."""
        ...

    def open(self, digest: str) -> BinaryIO:
        """Return the blob as a seekable file."""
        ...

    def read(self, digest: str) -> bytes: ...
    def put(self, pieces: Iterable[bytes | memoryview]) -> StoredBlob: ...
    def batch(self) -> AbstractContextManager[Batch]:
        """Return a batch whose finished blobs are safe at the end of `with`; unfinished blobs leave nothing
        behind."""
        ...
