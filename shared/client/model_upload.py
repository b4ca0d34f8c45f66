"""Upload of a run's initial model, block by block, without the blocks that the coordinator has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tessera.shared.api.versions import Manifest
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName, FileRef
from tessera.shared.model.spec import Model
from tessera.shared.schema import Digest, canonical
from tessera.shared.tensors.lazy import digest_of


class InitialModel(Protocol):
    """A run's initial model: a `ModelFolder`, or weights in memory."""

    @property
    def model(self) -> Model: ...
    def blocks(self) -> Iterator[tuple[Block, memoryview]]: ...
    def files(self) -> dict[FileName, bytes]: ...


class UploadTarget(Protocol):
    """A store of blobs: a `Client`, or a folder."""

    def has_blob(self, digest: str) -> bool: ...
    def put_bytes(self, data: bytes) -> str: ...


@dataclass(frozen=True)
class ModelUpload:
    """The digests for a run's spec, and the number of bytes that were sent."""

    model: Digest
    version: Digest
    sent_bytes: int


def upload_model(
    store: UploadTarget, start: InitialModel, progress: Callable[[int], None] = lambda _: None
) -> ModelUpload:
    """Upload a model's blocks, the files of its tokenizer, its document and its first version.

    `progress` receives each block's number of bytes once the store has it, also if it was not sent.
    """
    sent_bytes = 0

    def put(data: bytes | memoryview) -> Digest:
        nonlocal sent_bytes
        digest = digest_of(data)
        if not store.has_blob(digest):
            store.put_bytes(bytes(data))
            sent_bytes += len(data)
        return digest

    digests: dict[str, Digest] = {}
    for block, data in start.blocks():
        digests[block.name] = put(data)
        progress(block.nbytes)
    files = {name: FileRef(digest=put(raw), nbytes=len(raw)) for name, raw in start.files().items()}
    model = put(canonical(start.model.model_copy(update={"preprocessing": files})))
    return ModelUpload(model, put(canonical(Manifest(blocks=digests))), sent_bytes)
