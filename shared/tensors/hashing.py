"""Bytes hashed as they are written, so that they need not be read again."""

import hashlib
from pathlib import Path
from typing import BinaryIO, Protocol

from tessera.shared.problems import DigestMismatch


class Sink(Protocol):
    """A destination of bytes, such as a binary file."""

    def write(self, data: bytes | memoryview, /) -> int: ...
    def tell(self) -> int: ...


class Hashing:
    """A sink that hashes what passes on its way into another."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._found = hashlib.sha256()

    def write(self, data: bytes | memoryview, /) -> int:
        self._found.update(data)
        return self._sink.write(data)

    def tell(self) -> int:
        return self._sink.tell()

    @property
    def digest(self) -> str:
        return f"sha256:{self._found.hexdigest()}"

    def require(self, digest: str) -> None:
        """Raise DigestMismatch if what was written has another digest."""
        if self.digest != digest:
            raise DigestMismatch(f"the bytes received for {digest} are others", remedy="Fetch it again.")


def digest_at(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return digest_in(file)


def digest_in(file: BinaryIO) -> str:
    """Return the digest of the rest of an open file."""
    return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"  # type: ignore[arg-type]


def derive_seed(seed: int, *names: object) -> int:
    """Return a seed of 53 bits (exact in JSON) that depends on all of its arguments, and on nothing else."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11
