"""Uploads the model that a run starts from, block by block, leaving out what the coordinator has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tessera.shared.api.versions import Manifest
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.schema import Digest, canonical
from tessera.shared.tensors.lazy import digest_of


class InitialModel(Protocol):
    """What a run starts from: a `ModelFolder`, or weights in memory."""

    @property
    def model(self) -> Model: ...
    def blocks(self) -> Iterator[tuple[Block, memoryview]]: ...


class Taker(Protocol):
    """Who takes blobs: a `Client`, or a folder of them."""

    def has_blob(self, digest: str) -> bool: ...
    def put_bytes(self, data: bytes) -> str: ...


@dataclass(frozen=True)
class Uploaded:
    """The digests that a run names, and how many bytes had to be sent for them."""

    model: Digest
    version: Digest
    sent_bytes: int


def upload_model(taker: Taker, start: InitialModel, progress: Callable[[int], None] = lambda _: None) -> Uploaded:
    """Upload a model's blocks, its document and its first version.

    `progress` is told of each block's bytes once they are there, whether or not they had to be sent.
    """
    sent_bytes = 0

    def put(data: bytes | memoryview) -> Digest:
        nonlocal sent_bytes
        digest = digest_of(data)
        if not taker.has_blob(digest):
            taker.put_bytes(bytes(data))
            sent_bytes += len(data)
        return digest

    digests: dict[str, Digest] = {}
    for block, data in start.blocks():
        digests[block.name] = put(data)
        progress(block.nbytes)
    model = put(canonical(start.model))
    return Uploaded(model, put(canonical(Manifest(blocks=digests))), sent_bytes)
