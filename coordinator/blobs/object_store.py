"""Blobs in an S3-compatible store.

The store is not trusted. A blob exists if the table has its row, whose digest and size were computed before the
bytes were sent to the store; and an object is hashed before it is used for the first time. After that it is
recognized by the store's tag, which the row keeps, and hashed again when the tag changes.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import urlsplit

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, S3Store, from_url

from tessera.coordinator.limits.cache import LruCache
from tessera.shared.problems import StoreAway, StoreSpoilt
from tessera.shared.rounds.blob_store import StoredBlob

WINDOW_BYTES = 8 << 20
"""Bytes of one request for a whole object, so that no single request reaches the time limit."""

LEAST_WINDOW_BYTES = 1 << 18

LOCKS = 64
"""Locks of windows that are being read."""

TAGS_KEPT = 65_536
"""Objects whose tags are remembered; a forgotten one is hashed again."""

PROBE = "probe"
PROBE_SECONDS = 5.0
"""Time for which the store counts as working after a probe: unauthenticated callers may request readiness."""

AGAIN_SECONDS = 2.0
"""Time after which a caller may retry when the store did not respond."""

TIMES: Any = {"connect_timeout": "3s", "timeout": "30s"}
"""Limits of one request, which carries a few megabytes at most."""

SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Variables that may be in a file each, which the same name with `_FILE` names."""

RETRIES: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
"""Retries of short failures; a longer one is reported to the caller, who retries."""

log = structlog.get_logger()


class Objects:
    """An object store at `s3://bucket/prefix`, configured by `AWS_...` in the environment. Safe in any thread.

    Raises ValueError for a URL with anything else: it may be a secret, and URLs are logged.
    """

    def __init__(self, url: str, readahead_bytes: int) -> None:
        self.store = _opened(url)
        self._readahead_bytes = readahead_bytes
        self._ahead: Counter[str] = Counter()
        """The objects that are being read ahead, each with the number of its readers."""
        self._windows: LruCache[bytes] = LruCache(TAGS_KEPT, readahead_bytes, len)
        self._window_bytes = min(WINDOW_BYTES, readahead_bytes)
        self._reading = [threading.Lock() for _ in range(LOCKS)]
        self._sharing = threading.Lock()
        self._tags: LruCache[str] = LruCache(TAGS_KEPT)
        self._probing = threading.Lock()
        self._probed_until = 0.0

    # ------------------------------------------------------------ writing

    def put(self, digest: str, path: Path) -> None:
        """Store a file and return when the store confirms it; send a large file in parts."""
        # It may have been there already, under another tag.
        self._tags.drop(digest)
        with _translated():
            obstore.put(self.store, key_of(digest), path)

    def remove(self, digest: str, before: float) -> bool:
        """Remove an object that was written before this instant; return True if it did."""
        self._tags.drop(digest)
        with suppress(FileNotFoundError), _translated("object"):
            if obstore.head(self.store, key_of(digest))["last_modified"].timestamp() < before:
                obstore.delete(self.store, key_of(digest))
                return True
        return False

    def serves(self) -> bool:
        """Return True if the store accepted a few bytes and returned a part of them within `PROBE_SECONDS`."""
        with self._probing:
            if time.monotonic() < self._probed_until:
                return True
            with suppress(StoreAway), _translated():
                obstore.put(self.store, PROBE, PROBE.encode())
                # Some servers do not support ranges, which reading blobs requires.
                part = obstore.get(self.store, PROBE, options={"range": (1, 4)})
                if bytes(part.bytes()) == PROBE.encode()[1:4]:
                    self._probed_until = time.monotonic() + PROBE_SECONDS
                    return True
            return False

    # ------------------------------------------------------------ reading

    def size(self, digest: str) -> int | None:
        """Return the size of an object, or None if there is none."""
        with suppress(FileNotFoundError), _translated("object"):
            return int(obstore.head(self.store, key_of(digest))["size"])
        return None

    def listed(self, at_a_time: int) -> Iterator[Sequence[obstore.ObjectMeta]]:
        with _translated():
            yield from obstore.list(self.store, chunk_size=at_a_time)

    def open(self, blob: StoredBlob) -> BinaryIO:
        """Return a seekable file. Reading it raises StoreSpoilt and StoreAway."""
        if blob.digest in self._ahead:
            return io.BufferedReader(cast("io.RawIOBase", _WindowedFile(self, blob)))
        return io.BufferedReader(cast("io.RawIOBase", _ObjectFile(self, blob)), LEAST_WINDOW_BYTES)

    @contextmanager
    def reading_ahead(self, digests: Sequence[str]) -> Iterator[None]:
        """Read these objects in few large requests until the end of the block, though each is opened many times, by
        several threads. The memory for this is divided among them."""
        self._share(lambda: self._ahead.update(digests))
        try:
            yield
        finally:
            self._share(lambda: self._ahead.subtract(digests))

    def _share(self, change: Callable[[], None]) -> None:
        with self._sharing:
            change()
            self._ahead = +self._ahead
            if not self._ahead:
                self._windows = LruCache(TAGS_KEPT, self._readahead_bytes, len)
                return
            share = self._readahead_bytes // (len(self._ahead) * len(os.sched_getaffinity(0)))
            self._window_bytes = max(LEAST_WINDOW_BYTES, min(WINDOW_BYTES, share))

    def window(self, blob: StoredBlob, at: int) -> memoryview:
        """Return the bytes from `at` to the end of the window of the object in which it is. Raises StoreSpoilt and
        StoreAway."""
        size = self._window_bytes
        start = at - at % size
        name = _name(blob, size, start)
        # Of threads that need the same window, one reads it.
        with self._reading[hash(name) % LOCKS]:
            data = self._windows.get(name)
            if data is None:
                data = self.read(blob, start, min(start + size, blob.size))
                self._windows.keep(name, data)
        return memoryview(data)[at - start :]

    def read(self, blob: StoredBlob, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the object that was hashed. Raises StoreSpoilt and StoreAway."""
        for _ in range(2):
            expected = self._tags.get(blob.digest) or self.hash(blob)
            data, tag = self._get(blob, start, stop)
            if tag == expected:
                return data
            # Replaced, perhaps by the same bytes from another process.
            self._distrust(blob)
        raise StoreSpoilt(f"blob {blob.digest} is being replaced in the store while it is read")

    def knows(self, blob: StoredBlob) -> bool:
        """Return True if the object was hashed, by this process or an earlier one. Reading it compares its tag."""
        if blob.digest not in self._tags and blob.stamp is not None:
            self._tags.keep(blob.digest, blob.stamp)
        return bool(self._tags.get(blob.digest))

    def _distrust(self, blob: StoredBlob) -> None:
        """Have the object hashed before its next use, though its row has a tag."""
        self._tags.keep(blob.digest, "")

    def hash(self, blob: StoredBlob) -> str:
        """Hash an object and return the tag that identifies it from then on. Raise StoreSpoilt and StoreAway."""
        computed, tags, piece = hashlib.sha256(), set[str](), b""
        for at in range(0, blob.size, WINDOW_BYTES):
            piece, tag = self._get(blob, at, min(at + WINDOW_BYTES, blob.size))
            computed.update(piece)
            tags.add(tag)
        if len(tags) > 1 or f"sha256:{computed.hexdigest()}" != blob.digest:
            self._distrust(blob)
            raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name")
        tag = tags.pop() if tags else ""
        self._tags.keep(blob.digest, tag)
        if blob.digest in self._ahead and blob.size <= self._window_bytes:
            self._windows.keep(_name(blob, self._window_bytes, 0), piece)
        return tag

    def _get(self, blob: StoredBlob, start: int, stop: int) -> tuple[bytes, str]:
        """Return bytes of an object of the blob's size, and its tag."""
        try:
            with _translated("object"):
                result = obstore.get(self.store, key_of(blob.digest), options={"range": (start, stop)})
                if result.meta["size"] == blob.size:
                    data = bytes(result.bytes())
                    if len(data) == stop - start:
                        return data, result.meta["e_tag"] or str(result.meta["last_modified"])
        except FileNotFoundError:
            self._distrust(blob)
            raise StoreSpoilt(f"blob {blob.digest} is missing from the store") from None
        self._distrust(blob)
        raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name: it has another length")


def _name(blob: StoredBlob, size: int, start: int) -> str:
    """Return the name of a window of this size."""
    return f"{blob.digest} {size} {start}"


class _ObjectFile(io.RawIOBase):
    """An object as a plain readable file."""

    def __init__(self, objects: Objects, blob: StoredBlob) -> None:
        self._objects = objects
        self._blob = blob
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blob.size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self._at + len(buffer), self._blob.size)
        if stop <= self._at:
            return 0
        data = self._objects.read(self._blob, self._at, stop)
        buffer[: len(data)] = data
        self._at = stop
        return len(data)

    def readall(self) -> bytes:
        # In few requests; the base class sends one for every 8 KiB.
        starts = range(self._at, self._blob.size, WINDOW_BYTES)
        self._at = max(self._at, self._blob.size)
        return b"".join(
            self._objects.read(self._blob, start, min(start + WINDOW_BYTES, self._blob.size)) for start in starts
        )


class _WindowedFile(_ObjectFile):
    """An object that is read ahead."""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._at >= self._blob.size:
            return 0
        data = self._objects.window(self._blob, self._at)[: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def key_of(digest: str) -> str:
    """Return a blob's key in an object store, which is also its path in a folder."""
    hexadecimal = digest.removeprefix("sha256:")
    return f"{hexadecimal[:2]}/{hexadecimal}"


def _opened(url: str) -> ObjectStore:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "TESSERA_BLOB_URL holds more than s3://bucket/prefix; set credentials, region and endpoint in "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
        )
    if parts.scheme not in ("s3", "s3a"):
        try:
            return from_url(url)
        except (BaseError, ValueError) as fault:
            raise ValueError(f"TESSERA_BLOB_URL={url} is neither a folder nor s3://bucket/prefix") from fault
    # Options given here replace all those of the environment.
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on")
    options: Any = {**TIMES, "allow_http": plain}
    return S3Store.from_url(url, config=_keys_in_files(), client_options=options, retry_config=RETRIES)


def _keys_in_files() -> Any:
    """Return the store's keys that files hold. Raises OSError."""
    files = {name: os.environ[f"{name}_FILE"] for name in SECRETS if f"{name}_FILE" in os.environ}
    return {name.lower(): Path(file).read_text(encoding="utf-8-sig").strip() for name, file in files.items()}


@contextmanager
def _translated(of: Literal["object", "bucket"] = "bucket") -> Iterator[None]:
    """Translate the store's errors: raise StoreAway if it does not respond, refuses, or has no such bucket, and
    FileNotFoundError if it lacks the requested object."""
    try:
        yield
    except (BaseError, FileNotFoundError) as fault:
        if of == "object" and isinstance(fault, FileNotFoundError):
            raise
        # The store's message may name addresses and accounts: it is logged, and not sent to callers.
        log.warning("store.away", detail=str(fault).partition("\n")[0][:500])
        raise StoreAway("the coordinator's blob store did not answer", retry_after_seconds=AGAIN_SECONDS) from None
