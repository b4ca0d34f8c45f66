"""Blobs in an S3-compatible store.

The store is believed in nothing but that it may have kept what it was given. What exists is a row of the table, whose
digest and size were found before the bytes went there; and before a process uses an object for the first time it
hashes it. From then on it knows the object by the tag that the store gives it: bytes under another
tag are hashed anew.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import urlsplit

import obstore
import structlog
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, S3Store, from_url

from tessera.shared.problems import StoreAway, StoreSpoilt
from tessera.shared.rounds.blob_store import Stored

HASHED_BYTES = 1 << 22
"""What is read at a time to be hashed: a request each, so that none is cut off for having taken long in all."""

TAGS_KEPT = 65_536
"""Objects that are known by their tags. One that is forgotten is hashed once more."""

PROBE = "probe"
PROBE_SECONDS = 5.0
"""How long a store that took a probe counts as there: anybody may ask whether we are ready."""

AGAIN_SECONDS = 2.0
"""When a caller may ask again after the store did not answer."""

TIMES: Any = {"connect_timeout": "3s", "timeout": "30s"}
"""Of one request: no more than a few megabytes go in one."""

RETRIES: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
"""A hiccup is waited out here. Whoever meets more than that is told, and asks again."""

log = structlog.get_logger()


class Objects:
    """For any thread. `url` is `s3://bucket/prefix`; all else is in the environment, as `AWS_...`.

    Raises ValueError for a URL that holds more than that: a secret, perhaps, which would be shown with it.
    """

    def __init__(self, url: str) -> None:
        self.store = _opened(url)
        self._tags: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._probed_until = 0.0

    # ------------------------------------------------------------ writing

    def put(self, digest: str, path: Path) -> None:
        """Return once the store says that it is safe; large ones go in parts."""
        # Another may have put the same before: what is there now has another tag, perhaps.
        self.forget(digest)
        with _asked():
            obstore.put(self.store, key_of(digest), path)

    def remove(self, digest: str, before: float) -> bool:
        """Return whether there was one that was written before then, and now is not."""
        self.forget(digest)
        with suppress(FileNotFoundError), _asked("object"):
            if obstore.head(self.store, key_of(digest))["last_modified"].timestamp() < before:
                obstore.delete(self.store, key_of(digest))
                return True
        return False

    def serves(self) -> bool:
        """Return whether the store took a few bytes, and gave back a part of them, just now or a moment ago."""
        with self._probing:
            if time.monotonic() < self._probed_until:
                return True
            with suppress(StoreAway), _asked():
                obstore.put(self.store, PROBE, PROBE.encode())
                # There are servers that know no ranges, and blobs are not read whole.
                part = obstore.get(self.store, PROBE, options={"range": (1, 4)})
                if bytes(part.bytes()) == PROBE.encode()[1:4]:
                    self._probed_until = time.monotonic() + PROBE_SECONDS
                    return True
            return False

    # ------------------------------------------------------------ reading

    def size(self, digest: str) -> int | None:
        """None if there is no such object."""
        with suppress(FileNotFoundError), _asked("object"):
            return int(obstore.head(self.store, key_of(digest))["size"])
        return None

    def listed(self, at_a_time: int) -> Iterator[Sequence[obstore.ObjectMeta]]:
        with _asked():
            yield from obstore.list(self.store, chunk_size=at_a_time)

    def open(self, blob: Stored, readahead_bytes: int) -> BinaryIO:
        """Return a seekable file. Reading it raises StoreSpoilt, and StoreAway."""
        return io.BufferedReader(cast("io.RawIOBase", _ObjectFile(self, blob)), readahead_bytes)

    def read(self, blob: Stored, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop`, which are those that were hashed. Raises StoreSpoilt and StoreAway."""
        for _ in range(2):
            expected = self._tags.get(blob.digest) or self.hash(blob)
            data, tag = self._get(blob, start, stop)
            if tag == expected:
                return data
            # Replaced, by the same bytes perhaps: another process has uploaded them too.
            self.forget(blob.digest)
        raise StoreSpoilt(f"blob {blob.digest} is being replaced in the store while it is read")

    def verify(self, blob: Stored) -> None:
        """Hash an object that this process has not met. Raises StoreSpoilt and StoreAway."""
        if blob.digest not in self._tags:
            self.hash(blob)

    def hash(self, blob: Stored) -> str:
        """Hash an object and return the tag that it is known by from then on.

        Raises StoreSpoilt if it is missing or has other bytes than those of its name, and StoreAway.
        """
        found, at, tags = hashlib.sha256(), 0, set[str]()
        while at < blob.size:
            piece, tag = self._get(blob, at, min(at + HASHED_BYTES, blob.size))
            found.update(piece)
            at += len(piece)
            tags.add(tag)
        if len(tags) > 1 or f"sha256:{found.hexdigest()}" != blob.digest:
            self.forget(blob.digest)
            raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name")
        tag = tags.pop() if tags else ""
        with self._lock:
            self._tags[blob.digest] = tag
            self._tags.move_to_end(blob.digest)
            if len(self._tags) > TAGS_KEPT:
                self._tags.popitem(last=False)
        return tag

    def forget(self, digest: str) -> None:
        """It is hashed before it is used again."""
        with self._lock:
            self._tags.pop(digest, None)

    def _get(self, blob: Stored, start: int, stop: int) -> tuple[bytes, str]:
        """Return bytes of an object that has the size of the blob, and its tag."""
        try:
            with _asked("object"):
                result = obstore.get(self.store, key_of(blob.digest), options={"range": (start, stop)})
                if result.meta["size"] == blob.size:
                    data = bytes(result.bytes())
                    if len(data) == stop - start:
                        return data, result.meta["e_tag"] or str(result.meta["last_modified"])
        except FileNotFoundError:
            self.forget(blob.digest)
            raise StoreSpoilt(f"blob {blob.digest} is missing from the store") from None
        self.forget(blob.digest)
        raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name: it has another length")


class _ObjectFile(io.RawIOBase):
    """An object as a plain readable file."""

    def __init__(self, objects: Objects, blob: Stored) -> None:
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
        # In few requests; the way of the base class is one for every 8 KiB.
        whole = bytearray()
        while self._at < self._blob.size:
            stop = min(self._at + HASHED_BYTES, self._blob.size)
            whole += self._objects.read(self._blob, self._at, stop)
            self._at = stop
        return bytes(whole)


def key_of(digest: str) -> str:
    """Return where a blob lies, in an object store and in a folder alike."""
    hexadecimal = digest.removeprefix("sha256:")
    return f"{hexadecimal[:2]}/{hexadecimal}"


def _opened(url: str) -> ObjectStore:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "TESSERA_BLOB_URL holds more than s3://bucket/prefix; credentials, region and endpoint go into "
            "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
        )
    if parts.scheme not in ("s3", "s3a"):
        return from_url(url)
    # Options that are given here replace all that the environment says of the client.
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on")
    options: Any = {**TIMES, "allow_http": plain}
    return S3Store.from_url(url, client_options=options, retry_config=RETRIES)


@contextmanager
def _asked(of: Literal["object", "bucket"] = "bucket") -> Iterator[None]:
    """Within it the store is asked. Raises StoreAway if it does not answer, refuses, or knows no such bucket; and
    FileNotFoundError if it was asked of an object that it does not have."""
    try:
        yield
    except (BaseError, FileNotFoundError) as fault:
        if of == "object" and isinstance(fault, FileNotFoundError):
            raise
        # What the store says may name addresses and accounts: it is for our log, and not for our callers.
        log.warning("store.away", detail=str(fault).partition("\n")[0][:500])
        raise StoreAway("the coordinator's blob store did not answer", retry_after_seconds=AGAIN_SECONDS) from None
