"""Uploads the model that a run starts from, block by block, leaving out what the coordinator has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.client import Client
from shared.modelfolder import ModelFolder
from shared.tensors import digest_of
from shared.wire import Digest, Manifest, canonical


@dataclass(frozen=True)
class Uploaded:
    """The digests that a run names, and how many bytes had to be sent for them."""

    model: Digest
    version: Digest
    sent_bytes: int


def upload_model(client: Client, folder: ModelFolder, progress: Callable[[int], None] = lambda _: None) -> Uploaded:
    """Uploads a folder's blocks, its model document and its first version.

    `progress` is told of each block's bytes once the coordinator has them, whether or not they had to be sent.
    """
    sent_bytes = 0

    def put(data: bytes | memoryview) -> Digest:
        nonlocal sent_bytes
        digest = digest_of(data)
        if not client.has_blob(digest):
            client.put_bytes(bytes(data))
            sent_bytes += len(data)
        return digest

    digests: dict[str, Digest] = {}
    for block, data in folder.blocks():
        digests[block.name] = put(data)
        progress(block.nbytes)
    model = put(canonical(folder.model))
    return Uploaded(model, put(canonical(Manifest(blocks=digests))), sent_bytes)
