"""A bounded on-disk cache of fetched blobs by digest, which evicts the least recently used. It serves one process.

A file's name is its key, and its time of modification its last use. No row of the database repeats them, so that a
fetch waits for no commit; what is lost in a crash is fetched again.
"""

import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np

from tessera.shared.model.blocks import Block
from tessera.shared.problems import DigestMismatch
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.hashing import Hashing, Sink, digest_at
from tessera.shared.tensors.lazy import CHUNK, PIECE, Array, chunk_counts
from tessera.worker.state.atomic_files import sweep, written_whole

DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
NAMES = re.compile(r"sha256-([0-9a-f]{64})")

Progress = Callable[[int], None]
Source = Callable[[str, Sink, Progress], object]
"""Writes the blob of a digest to a file, and reports the bytes as they arrive: `Client.copy_blob`."""

Row = Callable[[tuple[str, ...], Sink, Progress], object]
"""The same for several blobs in sequence: `Client.copy_blobs`."""

NOTED_SECONDS = 60.0
"""Precision of the last use of a blob in the file system, by which the next process orders them."""


class BlobTooLarge(ValueError):
    """A blob is larger than its content can be, or than the room in the cache."""


class Cache:
    """The blobs under `folder`, at most `limit_bytes`. The constructor removes files that a killed process left."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._pinned: set[str] = set()
        # A disk may have corrupted what an earlier process wrote, so each blob is hashed again before its first use.
        self._checked: set[str] = set()
        self._noted_until: dict[str, float] = {}
        self._paths: dict[str, Path] = {}
        self._bytes = OrderedDict(_found(folder))  # by digest, the longest unused first
        self.total_bytes = sum(self._bytes.values())
        self._make_room(0)

    def __contains__(self, digest: str) -> bool:
        return digest in self._bytes

    @contextmanager
    def pinning(self) -> Iterator[None]:
        """Protect fetched blobs from eviction until the block ends."""
        try:
            yield
        finally:
            self._pinned.clear()

    def fetch(self, digest: str, max_bytes: int, source: Source, progress: Progress | None = None) -> Path:
        """Return the path of the blob, fetched from `source` if it is not cached.

        Raises DigestMismatch for bytes that do not match the digest, and BlobTooLarge for more than `max_bytes` or
        more than fit beside the blobs of the current task.
        """
        path = self.path(digest)
        # A model has hundreds of blobs, and a task needs each of them several times: one look at the disk is enough.
        is_here = digest in self._pinned and digest in self._bytes
        self._pinned.add(digest)
        if not (is_here or self._holds(digest, path)):
            self._download(digest, path, max_bytes, source, progress)
        self._bytes.move_to_end(digest)
        self._note_use(digest, path)
        return path

    def fetch_all(self, wanted: Mapping[str, int], source: Row, progress: Progress | None = None) -> None:
        """Fetch the missing ones of `wanted` (sizes in bytes by digest) in one request.

        Raises DigestMismatch and BlobTooLarge as `fetch` does. Blobs that were complete by then stay.
        """
        lacking = {digest: nbytes for digest, nbytes in wanted.items() if not self._holds(digest, self.path(digest))}
        self._pinned.update(wanted)
        if lacking:
            self._make_room(sum(lacking.values()))
            with closing(_Shelving(self, lacking)) as shelving:
                source(tuple(lacking), shelving, progress or (lambda _: None))
                shelving.finish()

    def take(self, digest: str, size: int) -> None:
        """Register a blob that was written to its path."""
        self.total_bytes += size - self._bytes.get(digest, 0)
        self._bytes[digest] = size
        self._checked.add(digest)

    def put(self, digest: str, pieces: Iterable[bytes | memoryview], max_bytes: int) -> bool:
        """Store a blob that was computed here, and return True. Store nothing and return False if its digest differs.

        Raises BlobTooLarge as `fetch` does.
        """

        def source(_: str, file: Sink, progress: Progress) -> None:
            for piece in pieces:
                progress(file.write(piece))

        try:
            self.fetch(digest, max_bytes, source)
        except DigestMismatch:
            return False
        return True

    def in_memory(self, digest: str) -> bytes | None:
        """Return None: the blobs are files."""

    def path(self, digest: str) -> Path:
        """Return the path of a blob, cached or not."""
        if (known := self._paths.get(digest)) is not None:
            return known
        match = DIGEST.fullmatch(digest)
        if match is None:
            raise ValueError(f"not a digest: {digest[:80]!r}")
        # A tenth of a small task's time, if it were made at every look.
        return self._paths.setdefault(digest, self._folder / match[1][:2] / f"sha256-{match[1]}")

    def _note_use(self, digest: str, path: Path) -> None:
        now = time.monotonic()
        if now >= self._noted_until.get(digest, now):
            self._noted_until[digest] = now + NOTED_SECONDS
            os.utime(path)

    def _holds(self, digest: str, path: Path) -> bool:
        if digest not in self._bytes:
            return False
        if path.exists() and (digest in self._checked or digest_at(path) == digest):
            self._checked.add(digest)
            return True
        path.unlink(missing_ok=True)
        self.total_bytes -= self._bytes.pop(digest)
        return False

    def _download(self, digest: str, path: Path, max_bytes: int, source: Source, progress: Progress | None) -> None:
        received = 0

        def count(nbytes: int) -> None:
            nonlocal received
            received += nbytes
            if received > max_bytes:
                raise BlobTooLarge(f"{digest} has more than the {max_bytes} bytes that it may have")
            if progress:
                progress(nbytes)

        # Not durable: after a power cut each blob is hashed before its first use anyway.
        with written_whole(path, durable=False) as file:
            hashing = Hashing(file)
            source(digest, hashing, count)
            hashing.require(digest)
            size = file.tell()
            self._make_room(size)
        self.take(digest, size)

    def _make_room(self, nbytes: int) -> None:
        # Each fetch looks, and a cache may hold tens of thousands of blobs.
        if self.total_bytes + nbytes <= self._limit_bytes:
            return
        for digest in [digest for digest in self._bytes if digest not in self._pinned]:
            self.path(digest).unlink(missing_ok=True)
            self._noted_until.pop(digest, None)
            self._paths.pop(digest, None)
            self.total_bytes -= self._bytes.pop(digest)
            if self.total_bytes + nbytes <= self._limit_bytes:
                return
        over = self.total_bytes + nbytes - self._limit_bytes
        raise BlobTooLarge(f"the task needs {over} bytes more than cache_bytes ({self._limit_bytes}): raise it")


class _Shelving:
    """A sink for blobs of known sizes in sequence, which moves each into the cache when it is complete."""

    def __init__(self, cache: Cache, sizes: Mapping[str, int]) -> None:
        self._cache = cache
        self._left = deque(sizes.items())
        self._written = 0
        self._stack = ExitStack()
        self._hashing: Hashing | None = None

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data)
        while view:
            if not self._left:
                raise DigestMismatch("more bytes came than the blobs have", remedy="Fetch them again.")
            digest, size = self._left[0]
            if self._hashing is None:
                path = self._cache.path(digest)
                self._hashing = Hashing(self._stack.enter_context(written_whole(path, durable=False)))
            piece = view[: size - self._hashing.tell()]
            self._hashing.write(piece)
            self._written += len(piece)
            view = view[len(piece) :]
            if self._hashing.tell() == size:
                self._settle(digest, size)
        return len(data)

    def tell(self) -> int:
        return self._written

    def finish(self) -> None:
        """Raise DigestMismatch if bytes are missing."""
        if self._left:
            raise DigestMismatch(f"the bytes ended before those of {self._left[0][0]}", remedy="Fetch them again.")

    def _settle(self, digest: str, size: int) -> None:
        if self._hashing:
            self._hashing.require(digest)
        self._hashing = None
        self._stack.close()
        self._cache.take(digest, size)
        self._left.popleft()

    def close(self) -> None:
        """Delete the blob if it is incomplete."""
        if self._hashing:
            unfinished = DigestMismatch("unfinished")
            with suppress(DigestMismatch):
                self._stack.__exit__(DigestMismatch, unfinished, None)


def _found(folder: Path) -> list[tuple[str, int]]:
    used = {}
    for path in folder.glob("??/sha256-*"):
        if match := NAMES.fullmatch(path.name):
            stat = path.stat()
            used[f"sha256:{match[1]}"] = (stat.st_mtime_ns, stat.st_size)
    return [(digest, size) for digest, (_, size) in sorted(used.items(), key=lambda item: item[1])]


@dataclass(frozen=True)
class BlobTensor:
    """A block in a file, from `offset`: its bytes in C order, read chunk by chunk on each iteration."""

    path: Path
    block: Block
    offset: int = 0
    data: bytes | None = None
    """The bytes of a small block, if they are in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def dtype(self) -> DType:
        return self.block.dtype

    def values(self) -> Array:
        """Return the block's values, read-only if they are in memory, and otherwise as a private mapping of the file:
        read when used, and not kept in memory."""
        dtype = NUMPY_DTYPES[self.block.dtype]
        if self.data is not None:
            return np.frombuffer(self.data, dtype).reshape(self.block.shape)
        return np.memmap(self.path, dtype=dtype, mode="c", offset=self.offset, shape=self.block.shape)

    def read_into(self, memory: Array) -> Iterator[Array]:
        """Read the values into contiguous memory of the block's shape and dtype. Yield each flat piece once it is
        read, while it is in a core's cache. Raises ValueError if the file ends before the block."""
        flat = memory.reshape(-1)
        with self._open() as file:
            for start in range(0, flat.size, PIECE):
                piece = flat[start : start + PIECE]
                if file.readinto(piece.view(np.uint8).data) != piece.nbytes:
                    raise ValueError(f"{self.path} ends within {self.block.name}")
                yield piece

    def chunks(self) -> Iterator[Array]:
        dtype = NUMPY_DTYPES[self.block.dtype]
        if self.data is not None and self.block.numel <= CHUNK:
            yield np.frombuffer(self.data, dtype, self.block.numel, self.offset)
            return
        with self._open() as file:
            for count in chunk_counts(self.block.numel):
                yield np.frombuffer(file.read(count * dtype.itemsize), dtype=dtype)

    def _open(self) -> BytesIO | BufferedReader:
        file = self.path.open("rb") if self.data is None else BytesIO(self.data)
        file.seek(self.offset)
        return file
