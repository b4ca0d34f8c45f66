"""Versions as values: a manifest of digests becomes a `State` of lazy tensors, and back."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TypeVar, cast

from pydantic import ValidationError

from tessera.shared.api.versions import Manifest, ServerTensor
from tessera.shared.methods.base import State
from tessera.shared.model.blocks import Block
from tessera.shared.model.config_safety import require_safe
from tessera.shared.model.preprocessing import TOKENIZER, require_file, vocabulary_in
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.problems import Fault, Invalid, NotFound, faults_of
from tessera.shared.rounds.blob_store import Batch, BlobStore, StoredBlob
from tessera.shared.tensors.bundles import bundled, bundles
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import (
    Array,
    SteppedTensor,
    Tensor,
    as_bytes,
    chunk_counts,
    from_bytes,
    lockstep,
    numel,
    related,
)
from tessera.shared.tensors.mmap_file import taken

Groups = Sequence[Sequence[Tensor]]

D = TypeVar("D", Model, Manifest)

Readable = Callable[[Collection[str]], Collection[str]]
"""A function from digests to the digests among them that a caller may read."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor stored as a blob, read from the store chunk by chunk at each use."""

    blobs: BlobStore
    digest: str
    shape: tuple[int, ...]
    dtype: DType

    def chunks(self) -> Iterator[Array]:
        width = NUMPY_DTYPES[self.dtype].itemsize
        with self.blobs.open(self.digest) as file:
            for count in chunk_counts(numel(self)):
                yield from_bytes(taken(file, count * width), self.dtype)


class States:
    """Reads versions, and writes them in some threads. Models and manifests never change: the last ones are kept."""

    def __init__(self, blobs: BlobStore, threads: int = 1) -> None:
        self._blobs = blobs
        self._threads = threads
        self.model = lru_cache(maxsize=16)(self._read_model)
        self.manifest = lru_cache(maxsize=64)(self._read_manifest)
        # One for all updates that start from it; but blocks that happen to be equal are computed apart.
        self._tensor = lru_cache(maxsize=1 << 14)(lambda _, *about: StoredTensor(blobs, *about))
        self._vocabulary = lru_cache(maxsize=16)(lambda digest: vocabulary_in(self.read(digest)))

    def _read_model(self, digest: str) -> Model:
        return Model.read(self._document(digest))

    def _read_manifest(self, digest: str) -> Manifest:
        return Manifest.read(self._document(digest), self._document)

    def _document(self, digest: str) -> bytes:
        size = self._blobs.size(digest)
        if size > MAX_DOCUMENT_BYTES:
            raise Invalid(f"blob {digest} has {size} bytes; a document has at most {MAX_DOCUMENT_BYTES}")
        return self._blobs.read(digest)

    def load(self, model: Model, manifest: Manifest, number: int) -> State:
        """Return the state that a version holds, none of its tensors read yet."""
        return State(
            round=number,
            model={block.name: self.tensor(block, manifest) for block in model.stored},
            server_state={
                name: StoredTensor(self._blobs, entry.digest, entry.shape, entry.dtype)
                for name, entry in manifest.server_state.items()
            },
            scalars=manifest.scalars,
        )

    def tensor(self, block: Block, manifest: Manifest) -> StoredTensor:
        return self._tensor(block.name, manifest.blocks[block.name], block.shape, block.dtype)

    def store(self, state: State, before: str | None = None) -> tuple[Manifest, list[StoredBlob]]:
        """Make a state's tensors safe, computing what is not stored yet: tensors that share sources in one pass.
        `before` is the digest of the version that it came from, if there is one.

        Returns its manifest and the new blobs, the manifest's own last.
        """
        tensors = [tensor for part in (state.model, state.server_state) for _, tensor in sorted(part.items())]
        new: list[StoredBlob] = []
        digests = {id(tensor): tensor.digest for tensor in tensors if isinstance(tensor, StoredTensor)}
        groups = related([tensor for tensor in tensors if not isinstance(tensor, StoredTensor)])
        for group, stored in zip(groups, materialize(self._blobs, groups, self._threads), strict=True):
            digests |= {id(tensor): blob.digest for tensor, blob in zip(group, stored, strict=True)}
            new += stored
        manifest = Manifest(
            blocks={name: digests[id(tensor)] for name, tensor in state.model.items()},
            server_state={
                name: ServerTensor(digest=digests[id(tensor)], shape=tensor.shape, dtype=tensor.dtype)
                for name, tensor in state.server_state.items()
            },
            scalars=dict(state.scalars),
        )
        root = self._root(manifest, before)
        manifest = manifest.model_copy(update={"root": root})
        new.append(self._blobs.put([manifest.document(self.manifest(root) if root else None)]))
        return manifest, new

    def _root(self, manifest: Manifest, before: str | None) -> str | None:
        """Return the manifest whose difference is written: the root of the version before, or that
        version, as long as it shares half of the blocks."""
        if before is None:
            return None
        last = self.manifest(before)
        if manifest == last.model_copy(update={"root": None}):
            # The same version, and so the same document.
            return last.root
        root = last.root or before
        return root if 2 * len(manifest.changed(self.manifest(root))) <= len(manifest.blocks) else None

    # ------------------------------------------------------------ checking what an orchestrator brings

    def check(self, model_digest: str, version_digest: str, readable: Readable) -> tuple[Model, Manifest]:
        """Return a new run's model and first version. Raises Invalid saying everything that does not fit together. A
        blob that is not `readable` is reported as one that is not there."""
        model = self._checked("/model", self.model, model_digest)
        manifest = self._checked("/version", lambda digest: self.manifest_of(digest, readable), version_digest)
        require_safe(model.config)
        known = readable(manifest.digests)
        faults = [
            Fault(pointer=f"/version/blocks/{name}", detail="the model has no such block")
            for name in sorted(set(manifest.blocks) - {block.name for block in model.stored})
        ]
        for block in sorted(model.stored, key=attrgetter("name")):
            pointer = f"/version/blocks/{block.name}"
            faults += self._blob_faults(pointer, block.nbytes, manifest.blocks.get(block.name), known)
        for name, entry in sorted(manifest.server_state.items()):
            faults += self._blob_faults(f"/version/server_state/{name}", entry.nbytes, entry.digest, known)
        if faults:
            raise Invalid("the first version does not fit the model", errors=faults)
        return model, manifest

    def manifest_of(self, digest: str, readable: Readable) -> Manifest:
        """Return a manifest that a caller has uploaded. Raise NotFound if its root is not `readable`, and ValueError
        for another document."""

        def root_of(root: str) -> bytes:
            if root not in readable([root]):
                raise NotFound(f"there is no blob {root}")
            return self._document(root)

        return Manifest.read(self._document(digest), root_of)

    def check_files(self, model: Model, readable: Readable) -> None:
        """Raise Invalid for a file of the tokenizer or image processor that is not `readable`, has the wrong size, or
        unsafe settings."""
        known = readable([ref.digest for ref in model.preprocessing.values()])
        for name, ref in model.preprocessing.items():
            if faults := list(self._blob_faults(f"/model/preprocessing/{name}", ref.nbytes, ref.digest, known)):
                raise Invalid("a file of the model's tokenizer or image processor cannot be used", errors=faults)
            require_file(name, self.read(ref.digest))

    def vocabulary(self, model: Model) -> str | None:
        """Return a digest of the words of the model's tokenizer and their numbers; None without a tokenizer."""
        file = model.preprocessing.get(TOKENIZER)
        return self._vocabulary(file.digest) if file else None

    def read(self, digest: str) -> bytes:
        return self._blobs.read(digest)

    def _checked(self, pointer: str, read: Callable[[str], D], digest: str) -> D:
        try:
            return read(digest)
        except NotFound as problem:
            faults = [Fault(pointer=pointer, detail=f"a blob was not uploaded: {problem.detail}")]
        except ValidationError as refusal:
            faults = faults_of(refusal, pointer)
        except ValueError as fault:
            faults = [Fault(pointer=pointer, detail=str(fault))]
        raise Invalid(f"the run's {pointer[1:]} document cannot be used", errors=faults)

    def _blob_faults(
        self, pointer: str, nbytes: int, digest: str | None, readable: Collection[str]
    ) -> Iterator[Fault]:
        if digest is None:
            yield Fault(pointer=pointer, detail="this block of the model is missing")
            return
        try:
            size = self._blobs.size(digest) if digest in readable else None
        except NotFound:
            size = None
        if size is None:
            yield Fault(pointer=pointer, detail=f"blob {digest} was not uploaded")
        elif size != nbytes:
            yield Fault(pointer=pointer, detail=f"blob {digest} has {size} bytes; {nbytes} are needed")


def materialize(blobs: BlobStore, groups: Groups, threads: int = 1) -> list[list[StoredBlob]]:
    """Compute groups of tensors, each group in one pass, and make them safe. Return the blob of each."""
    # Many small tensors as one. The largest first, so that no thread is left with one when the others have done.
    places = bundles(groups)
    together = [[groups[place] for place in bundle] for bundle in places]
    order = sorted(range(len(together)), key=lambda index: -sum(numel(t) for group in together[index] for t in group))
    with blobs.batch() as batch:
        if threads == 1 or len(order) <= 1:
            stored = [_materialize_bundle(batch, together[index]) for index in order]
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="merge") as pool:
                try:
                    stored = list(pool.map(lambda index: _materialize_bundle(batch, together[index]), order))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    by_place = {
        place: found
        for index, bundle in zip(order, stored, strict=True)
        for place, found in zip(places[index], bundle, strict=True)
    }
    return [by_place[place] for place in range(len(groups))]


def _materialize_bundle(batch: Batch, groups: Groups) -> list[list[StoredBlob]]:
    """Compute and store groups: one alone, or a bundle of small tensors."""
    if len(groups) == 1:
        return [_materialize_group(batch, groups[0])]
    tensors = [cast("SteppedTensor", tensor) for (tensor,) in groups]
    (chunk,) = bundled(tensors).chunks()
    found, at = [], 0
    for tensor in tensors:
        with batch.writer() as writer:
            writer.write(as_bytes(chunk[at : at + numel(tensor)]))
            found.append([writer.finish()])
        at += numel(tensor)
    return found


def _materialize_group(batch: Batch, group: Sequence[Tensor]) -> list[StoredBlob]:
    with ExitStack() as stack:
        writers = [stack.enter_context(batch.writer()) for _ in group]
        for chunks in lockstep(group):
            for writer, chunk in zip(writers, chunks, strict=True):
                writer.write(as_bytes(chunk))
        return [writer.finish() for writer in writers]
