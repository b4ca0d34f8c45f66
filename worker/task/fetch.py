"""The stage that fetches a version according to the plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import structlog
from pydantic import ValidationError

from tessera.shared.api.versions import Manifest, ServerTensor
from tessera.shared.methods.base import REFERENCE, UnsupportedRun
from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import DatasetSchema, token_rows
from tessera.shared.model.preprocessing import TOKENIZER, FileName, require_file, vocabulary_in
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.model.training_faults import training_faults
from tessera.shared.problems import Invalid, InvalidUpdate, faults_of
from tessera.shared.tensors.lazy import CHUNK, Array, as_bytes, digest_of, from_bytes
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.codecs.stage import CodecError
from tessera.shared.updates.update_file import read_update
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.errors import InputMismatch, TaskFailure
from tessera.worker.governance.policy import PolicyViolation, require
from tessera.worker.governance.run_history import after_restore
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import NO_HEAD, StateRolledBack
from tessera.worker.state.base_sources import BaseUnavailable
from tessera.worker.state.blob_cache import BlobTensor, BlobTooLarge
from tessera.worker.state.error_feedback import Feedback, without_feedback
from tessera.worker.task.environment import MAX_INLINE, CachedVersion, TaskRun
from tessera.worker.task.handover import FetchedVersion

MIN_DIFFERENCE_BYTES = 1 << 16
"""The smallest total size of missing blocks for which a difference is requested."""
TOKENIZER_FILES: tuple[FileName, ...] = (TOKENIZER, "tokenizer_config.json")


def _vocabulary(run: TaskRun, document: Model) -> str | None:
    """Return the vocabulary of the model's tokenizer, which is fetched once; None without one."""
    file, known = document.preprocessing.get(TOKENIZER), run.env.vocabularies
    if file and file.digest not in known:
        known[file.digest] = vocabulary_in(run.read(file.digest, file.nbytes))
    return known[file.digest] if file else None


def fetch(run: TaskRun, dataset: DatasetInfo) -> FetchedVersion:
    """Fetch the version's blocks into local files.

    Raises PolicyViolation, TaskFailure, InputMismatch, UnsupportedRun, ConfigError, ModelMismatch, Problem.
    """
    env, task = run.env, run.task
    # Store inline blobs as if they had been fetched; ignore more than the protocol allows.
    if sum(map(len, task.inline_blobs)) <= MAX_INLINE:
        for data in task.inline_blobs:
            run.report.download_bytes += len(data)
            env.shelf.put(digest_of(data), [data], len(data))
    document = read_model(run)
    model_type = str(document.config["model_type"])
    env.policy.check_model_type(model_type)
    env.policy.check_model(document.nbytes)
    vocabulary = _vocabulary(run, document) if dataset.schema.vocabulary else None
    # Then no message may depend on the longest text.
    is_silent = task.privacy is not None or task.sums is not None
    prefers = task.training.loss == "dpo"
    require_fit(document, task.dataset, dataset.schema, padded=is_silent, vocabulary=vocabulary, prefers=prefers)
    if faults := [f"training.{name} {said}" for name, said in training_faults(task.training, document)]:
        raise UnsupportedRun("; ".join(faults))
    names = {block.name for block in task.plan.fetch.resolve(document.blocks)}
    checked = env.executor.check(run, document, dataset)
    blocks = checked.blocks
    _require_dense(run, document, blocks)
    manifest = read_manifest(run)
    wanted = [block for block in blocks if block.name in names]
    stored = [block for block in blocks if block.name not in document.external]
    bases = _fetch_base(run, document, wanted)
    began_at, before = env.clock(), run.report.download_bytes
    bases |= _fetch_blocks(run, manifest, [block for block in wanted if block.name not in document.external], stored)
    transfer = run.report.download_bytes - before, env.clock() - began_at
    tokenizer = _tokenizer_files(run, document) if dataset.raw_texts else {}
    state, kept = _fetch_memory(run, manifest), _kept(run)
    return FetchedVersion(
        document,
        run.mapping(document),
        manifest,
        blocks,
        bases,
        checked.four_bits,
        state,
        without_feedback(kept),
        tokenizer,
        transfer,
        Feedback.of(kept, task.plan.stage),
    )


def require_fit(
    model: Model,
    name: str,
    schema: DatasetSchema,
    *,
    padded: bool,
    vocabulary: str | None = None,
    prefers: bool = False,
) -> None:
    """Raise InputMismatch if the data set's schema certainly does not fit the model, whose tokenizer has this
    vocabulary, or a run that `prefers` one of two answers."""
    if found := schema.mismatches(model, padded=padded, vocabulary=vocabulary, prefers=prefers):
        raise InputMismatch(f"the data set {name!r} does not fit the model: {'; '.join(found)}")


def _require_dense(run: TaskRun, document: Model, blocks: Sequence[Block]) -> None:
    """Raise PolicyViolation for an update of rows that single sites move, unless a sum has noise or the site allows
    it."""
    task, party = run.task, run.env.sums
    rows = token_rows(document.head, task.plan.upload.resolve(blocks)) if task.in_exact_sum else []
    name = min((block.name for block in rows), default="")
    detail = f"a row of {name} that this site alone moves could be read from the sum"
    require(not rows or (party is not None and party.embeddings), "secure_sums.embeddings", detail)


def _kept(run: TaskRun) -> dict[str, Array]:
    """Return the tensors that the site keeps of the run, once it is known whether its last update was merged.

    Raises PolicyViolation, StateRolledBack and Problem.
    """
    env, task = run.env, run.task
    env.vault.settle_run(task.run, task.receipt, env.coordinator.task)
    _require_merged(run)
    return env.vault.load(task.run)


def _require_merged(run: TaskRun) -> None:
    """Raise StateRolledBack if the tensors that the run keeps here are older than its last merged update, or gone,
    and PolicyViolation if they are newer."""
    env, task = run.env, run.task
    if env.audit is None or env.history is None or task.receipt is None:
        return
    if env.vault.lacks(task.receipt, task.run, kept=env.history.kept_by(task.run, task.receipt.task)):
        # In the order in which they left. Then the worker's state is whole, and the coordinator's is older.
        left = [f"{entry.task} {entry.token}" for entry in env.audit.read() if entry.action == "update.leave"]
        merged, ours = f"{task.receipt.task} {task.receipt.token}", env.vault.task_of(task.run)
        if merged in left and ours in left[left.index(merged) :]:
            newer = f"the tensors that run {task.run_name} keeps here are newer than its last merged update"
            raise PolicyViolation("round", f"{newer}. {after_restore(task.run)}")
        older = f"the tensors that run {task.run_name} keeps here are older than its last merged update, or gone"
        raise StateRolledBack(older, NO_HEAD)


def _tokenizer_files(run: TaskRun, document: Model) -> dict[FileName, bytes]:
    """Return the files of the run's tokenizer. Raises TaskFailure and Problem."""
    files = document.preprocessing
    if TOKENIZER not in files:
        raise TaskFailure(
            "no-tokenizer",
            f"the data set {run.task.dataset!r} takes the run's tokenizer, and the run's model has none: start the "
            "run from a folder with one, or name a tokenizer in the site's settings",
        )
    found = {name: run.read(files[name].digest, files[name].nbytes) for name in TOKENIZER_FILES if name in files}
    for name, raw in found.items():
        try:
            require_file(name, raw)
        except Invalid as fault:
            raise TaskFailure("invalid-tokenizer", fault.detail) from None
    return found


def read_model(run: TaskRun) -> Model:
    """Return the description of the task's model. Raises TaskFailure."""
    digest = run.task.model
    with failing_as("invalid-model"):
        run.fetch(digest, MAX_DOCUMENT_BYTES)
        return run.env.documents.read(Model, digest, lambda: Model.read(run.document(digest)))


def read_manifest(run: TaskRun) -> Manifest:
    """Return the manifest of the task's version. Raises TaskFailure."""
    digest = run.task.version.digest
    with failing_as("invalid-version"):
        run.fetch(digest, MAX_DOCUMENT_BYTES)
        manifest = run.env.documents.read(Manifest, digest, lambda: Manifest.read(run.document(digest), run.document))
        if manifest.root:
            # Of a manifest read before, the root is fetched too: the cache keeps what tasks use.
            run.fetch(manifest.root, MAX_DOCUMENT_BYTES)
    return manifest


def _fetch_memory(run: TaskRun, manifest: Manifest) -> dict[str, Array]:
    """Fetch the server state that the plan requests, and the reference of preferences. Raises PolicyViolation,
    TaskFailure."""
    entries: dict[str, ServerTensor] = {}
    patterns = run.task.plan.server_state
    if run.task.training.loss and any(name.startswith(REFERENCE) for name in manifest.server_state):
        patterns = (*patterns, f"{REFERENCE}*")
    for pattern in patterns:
        named = {name: entry for name, entry in sorted(manifest.server_state.items()) if fnmatchcase(name, pattern)}
        if not named:
            raise TaskFailure("invalid-plan", f"the version has no server state named {pattern}")
        entries |= named
    run.env.policy.check_model(sum(entry.nbytes for entry in entries.values()), "server state")
    arrays: dict[str, Array] = {}
    for name, entry in entries.items():
        raw = run.read(entry.digest, entry.nbytes)
        if len(raw) != entry.nbytes:
            raise TaskFailure("invalid-version", f"server state {name} has {len(raw)} bytes, not {entry.nbytes}")
        arrays[name] = from_bytes(raw, entry.dtype).reshape(entry.shape)
        require_finite(name, arrays[name])
    return arrays


def require_finite(name: str, values: Array) -> None:
    """Raise TaskFailure for NaN or infinite values, which would waste the privacy that training spends."""
    flat = values.reshape(-1)
    if not all(np.isfinite(flat[start : start + CHUNK]).all() for start in range(0, flat.size, CHUNK)):
        raise TaskFailure("invalid-version", f"{name} holds values that are NaN or infinite")


def _fetch_base(run: TaskRun, document: Model, wanted: Sequence[Block]) -> dict[str, BlobTensor]:
    """Return the wanted blocks of an external base, which come from the site alone. Raises TaskFailure."""
    blocks = {document.external[block.name]: block for block in wanted if block.name in document.external}
    if not blocks:
        return {}
    if run.env.bases is None:
        raise TaskFailure("no-base", "this worker has no cache of external bases")
    try:
        convert = partial(run.env.executor.convert, run, document)
        spans = run.env.bases.fetch(blocks, convert, run.check)
    except BaseUnavailable as fault:
        structlog.get_logger("worker").warning("no-base", detail=str(fault), faults=fault.faults)
        raise TaskFailure("no-base", str(fault)) from None
    found = {}
    for block in wanted:
        if digest := document.external.get(block.name):
            span = spans[digest]
            if span.nbytes != block.nbytes:
                raise TaskFailure("invalid-model", f"{block.name}: {digest} has {span.nbytes} bytes")
            found[block.name] = BlobTensor(span.path, block, span.offset)
    return found


def _fetch_blocks(
    run: TaskRun, manifest: Manifest, wanted: Sequence[Block], blocks: Sequence[Block]
) -> dict[str, BlobTensor]:
    if odd := sorted(set(manifest.blocks) ^ {block.name for block in blocks}):
        raise TaskFailure("invalid-version", f"the version and the model have different blocks: {odd[:8]}")
    shelf, report = run.env.shelf, run.report
    sizes = {manifest.blocks[block.name]: block.nbytes for block in wanted}
    lacking_bytes = sum(nbytes for digest, nbytes in sizes.items() if digest not in shelf)
    report.begin("fetching", total_bytes=report.download_bytes + lacking_bytes)
    _catch_up(run, manifest, wanted, blocks)
    shelf.fetch_all(sizes, run.env.coordinator.copy_blobs, run.count)
    bases: dict[str, BlobTensor] = {}
    for block in wanted:
        digest = manifest.blocks[block.name]
        path = run.fetch(digest, block.nbytes)
        data = shelf.in_memory(digest)
        nbytes = path.stat().st_size if data is None else len(data)
        if nbytes != block.nbytes:
            raise TaskFailure("invalid-version", f"{block.name}: the blob has {nbytes} bytes, not {block.nbytes}")
        bases[block.name] = BlobTensor(path, block, data=data)
    return bases


def _catch_up(run: TaskRun, manifest: Manifest, wanted: Sequence[Block], blocks: Sequence[Block]) -> None:
    """Reconstruct missing blocks from the last task's version, unless the run says `raw` or few bytes are missing.

    Blocks that cannot be reconstructed are fetched whole afterwards.
    """
    env, task, shelf = run.env, run.task, run.env.shelf
    known, env.versions[task.run] = env.versions.get(task.run), CachedVersion(task.version.number, manifest)
    if known is None:
        return
    before = known.manifest.blocks
    lacking = [b for b in wanted if manifest.blocks[b.name] not in shelf and before[b.name] in shelf]
    lacking_bytes = sum(block.nbytes for block in lacking)
    if task.codec == pipeline.RAW or lacking_bytes < MIN_DIFFERENCE_BYTES:
        return
    number, since = task.version.number, known.number

    def received(nbytes: int) -> None:
        run.count(nbytes)
        if file.tell() > lacking_bytes:
            raise BlobTooLarge(f"the difference is larger than the {lacking_bytes} bytes of its blocks")

    with temporary_file(env.scratch) as (path, file):
        if not env.coordinator.copy_difference(task.run, number, since, file, lacking_bytes, received):
            return
        file.flush()
        table = {block.name: block for block in blocks}
        bases = {name: BlobTensor(shelf.path(before[name]), block) for name, block in table.items()}
        try:
            tensors = read_update(lambda: path.open("rb"), path.stat().st_size, table, bases)
            usable = True
            for block in lacking:
                run.check()
                pieces = map(as_bytes, tensors[block.name].chunks())
                usable = shelf.put(manifest.blocks[block.name], pieces, block.nbytes) and usable
        except (InvalidUpdate, CodecError, KeyError):
            usable = False
    if not usable:
        structlog.get_logger("worker").warning("difference-unusable", run=task.run_name, round=task.round)


@contextmanager
def failing_as(code: str) -> Iterator[None]:
    """Turn validation errors in the block into TaskFailure with this code."""
    try:
        yield
    except ValidationError as refusal:
        raise TaskFailure(code, faults_in(refusal)) from None
    except (TaskFailure, BlobTooLarge):
        raise
    except ValueError as fault:
        raise TaskFailure(code, str(fault)[:300]) from None


def faults_in(refusal: ValidationError) -> str:
    """Return the first eight faults of a document in one line."""
    return "; ".join(f"{fault.pointer}: {fault.detail}" for fault in faults_of(refusal)[:8])
