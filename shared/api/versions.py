"""Versions of the global state: manifests of blobs, and differences between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from math import prod
from typing import Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)

from tessera.shared.json_limits import read_document
from tessera.shared.model.blocks import MAX_BLOCKS, Name
from tessera.shared.schema import MAX_BLOBS_PER_REQUEST, Digest, Message, Value, canonical
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import digest_of

# ---------------------------------------------------------------- versions


class ServerTensor(Value):
    digest: Digest
    shape: tuple[PositiveInt, ...] = Field(max_length=8)
    dtype: DType

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


class Manifest(Value):
    """A version: the digest of each block, and what the method remembers. Its own digest is the version's.

    As a document it may name an earlier version's manifest as its root, and then has only the blocks that differ, so
    that a round which moves little of a model is not mostly manifest. `read` puts the others in.
    """

    format: Literal[2] = 2
    blocks: dict[Name, Digest] = Field(max_length=MAX_BLOCKS)
    server_state: dict[Name, ServerTensor] = {}
    scalars: dict[str, float] = {}
    root: Digest | None = None

    @classmethod
    def read(cls, document: bytes, fetch: Callable[[Digest], bytes]) -> Self:
        """Return the manifest of a document; its root's is fetched. Raises ValueError for another document."""
        manifest = read_document(cls, document)
        if manifest.root is None:
            return manifest
        root = read_document(cls, fetch(manifest.root))
        if root.root is not None:
            raise ValueError(f"the root {manifest.root} of a manifest has itself a root")
        return manifest.model_copy(update={"blocks": root.blocks | manifest.blocks})

    def document(self, root: Manifest | None = None) -> bytes:
        """Return the stored document; `root` is the manifest that `self.root` names."""
        if root is None:
            return canonical(self)
        return canonical(self.model_copy(update={"blocks": self.changed(root)}))

    def changed(self, since: Manifest) -> dict[Name, Digest]:
        """Return the blocks that are other than in that manifest."""
        return {name: digest for name, digest in self.blocks.items() if since.blocks.get(name) != digest}

    @property
    def values(self) -> Digest:
        """The digest of the model's values alone: method state or another root does not change it."""
        return digest_of(canonical(self.model_copy(update={"server_state": {}, "scalars": {}, "root": None})))

    @property
    def digests(self) -> set[Digest]:
        """The blobs that it refers to."""
        of_memory = {entry.digest for entry in self.server_state.values()}
        return {*self.blocks.values(), *of_memory} | ({self.root} if self.root else set())


class VersionRef(Message):
    number: NonNegativeInt
    digest: Digest


class BlobRequest(Message):
    """Blobs to be read one behind the other, each once, from byte `start` of them all on."""

    digests: tuple[Digest, ...] = Field(
        min_length=1, max_length=MAX_BLOBS_PER_REQUEST, json_schema_extra={"uniqueItems": True}
    )
    start: NonNegativeInt = Field(default=0, lt=1 << 53)

    @field_validator("digests")
    @classmethod
    def _each_once(cls, digests: tuple[Digest, ...]) -> tuple[Digest, ...]:
        if twice := [digest for digest, times in Counter(digests).items() if times > 1]:
            raise ValueError(f"{twice[0]} is named more than once")
        return digests


class Version(VersionRef):
    """A version with its method's metrics for programs, and warnings as sentences for people."""

    created_at: datetime
    retired_at: datetime | None = None
    scalars: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
