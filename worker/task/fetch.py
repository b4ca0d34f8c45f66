"""The stages that fetch a version according to the plan and load it into a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import structlog
import torch
from pydantic import ValidationError

from tessera.shared.api.versions import Manifest, ServerTensor
from tessera.shared.methods.base import UnsupportedRun, WorkerHalf
from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import token_rows
from tessera.shared.model.preprocessing import TOKENIZER, FileName, require_file, vocabulary_in
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.model.training_faults import training_faults
from tessera.shared.problems import Invalid, InvalidUpdate, faults_of
from tessera.shared.tensors.lazy import CHUNK, Array, as_bytes, digest_of, from_bytes, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.codecs.stage import CodecError
from tessera.shared.updates.update_file import read_update
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.errors import TaskFailure
from tessera.worker.governance.policy import PolicyViolation, require
from tessera.worker.governance.run_history import after_restore
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import allocate, check_model, laid_out, memory_of, write_block
from tessera.worker.model.device_memory import free_bytes, needed_bytes
from tessera.worker.model.forward import objective_of
from tessera.worker.model.four_bits import four_bit_layers, four_bit_tensors, put_four_bits, require_frozen
from tessera.worker.model.layouts import MappingFile
from tessera.worker.model.snapshot import converted_blocks
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import NO_HEAD, StateRolledBack
from tessera.worker.state.base_sources import BaseUnavailable
from tessera.worker.state.blob_cache import BlobTensor, BlobTooLarge
from tessera.worker.state.error_feedback import without_feedback
from tessera.worker.task.environment import MAX_INLINE, CachedVersion, TaskRun
from tessera.worker.task.model_cache import Built, structure_of
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.input_mismatch import require_fit
from tessera.worker.training.optimization.micro_batch import require_divisible
from tessera.worker.training.optimization.moments import Moments, without_moments
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.ranks import require_shardable

MIN_DIFFERENCE_BYTES = 1 << 16
"""The smallest total size of missing blocks for which a difference is requested."""
TOKENIZER_FILES: tuple[FileName, ...] = (TOKENIZER, "tokenizer_config.json")


@dataclass(frozen=True)
class Fetched:
    """A version on this machine and the description of its model."""

    document: Model
    mapping: MappingFile | None
    manifest: Manifest
    blocks: tuple[Block, ...]
    """The model's block table, computed here."""
    bases: Mapping[str, BlobTensor]
    """The version's value of each fetched block."""
    four_bits: frozenset[str] = frozenset()
    """The matrices to keep in 4 bits."""
    server_state: Mapping[str, Array] = field(default_factory=dict)
    """The server state that the plan requests."""
    kept: Mapping[str, Array] = field(default_factory=dict)
    """The tensors that this site keeps between the run's rounds."""
    tokenizer: Mapping[FileName, bytes] = field(default_factory=dict)
    """The files of the run's tokenizer, if the data set takes it."""

    @property
    def is_whole(self) -> bool:
        """True if every block is fetched, so that a model of the last round is overwritten: local values of a block
        that is not fetched must not leak into this round."""
        return len(self.bases) == len(self.blocks)

    def content(self, block: Block) -> str:
        """Return the digest of a block's values."""
        return self.document.external.get(block.name) or self.manifest.blocks[block.name]


@dataclass(frozen=True)
class Loaded:
    """A task with its version loaded."""

    document: Model
    built: Built
    half: WorkerHalf[Any]
    context: LocalTaskContext
    bases: Mapping[str, BlobTensor]
    """The version's value of each fetched block."""
    moments: Moments
    """The optimizer's moments from earlier rounds."""

    def personalise(self) -> None:
        """Restore the site's private state into the model and let the method set it up."""
        self.context.restore(self.half.private())
        self.half.setup(self.context)

    def is_changed(self) -> bool:
        """Return whether any fetched block differs from the version. What has 4 bits never changes."""
        return any(
            self.context.read(base.block).tobytes() != to_array(base).tobytes()
            for base in self.bases.values()
            if base.block.tensor not in self.built.four_bits
        )


def _vocabulary(run: TaskRun, document: Model) -> str | None:
    """Return the vocabulary of the model's tokenizer, which is fetched once; None without one."""
    file, known = document.preprocessing.get(TOKENIZER), run.env.vocabularies
    if file and file.digest not in known:
        known[file.digest] = vocabulary_in(run.read(file.digest, file.nbytes))
    return known[file.digest] if file else None


def fetch(run: TaskRun, dataset: DatasetInfo) -> Fetched:
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
    require_fit(document, task.dataset, dataset.schema, padded=is_silent, vocabulary=vocabulary)
    if faults := [f"training.{name} {said}" for name, said in training_faults(task.training, document)]:
        raise UnsupportedRun("; ".join(faults))
    names = {block.name for block in task.plan.fetch.resolve(document.blocks)}
    mapping = env.mappings.get(model_type)

    def block_table() -> tuple[Block, ...]:
        if env.sandbox:
            env.sandbox.require(document, mapping, run.check)
        return check_model(document, mapping)

    blocks = env.models.document(tuple, task.model, block_table)
    _require_dense(run, document, blocks)
    four_bits = frozenset[str]()
    if env.setup.compute.base_bits:
        four_bits = env.models.document(frozenset, task.model, lambda: four_bit_tensors(document, mapping))
        require_frozen(document, four_bits, task.plan, is_training=task.kind == "train")
    if env.setup.compute.shard:
        require_shardable(run.half(document), task.plan, document, task.training, private=task.privacy is not None)
    if task.kind == "train" and task.privacy is None:
        require_divisible(run.half(document), blocks, dataset, task.training, env.setup.micro_batch)
    manifest = _read_manifest(run)
    if len(names) < len(blocks) or not env.models.holds(task.run, task.model, four_bits):
        require_memory(run, document, four_bits)
    wanted = [block for block in blocks if block.name in names]
    stored = [block for block in blocks if block.name not in document.external]
    bases = _fetch_base(run, document, wanted)
    bases |= _fetch_blocks(run, manifest, [block for block in wanted if block.name not in document.external], stored)
    tokenizer = _tokenizer_files(run, document) if dataset.raw_texts else {}
    state, kept = _fetch_memory(run, manifest), _kept(run)
    return Fetched(document, mapping, manifest, blocks, bases, four_bits, state, kept, tokenizer)


def _require_dense(run: TaskRun, document: Model, blocks: Sequence[Block]) -> None:
    """Raise PolicyViolation for an update of rows that single sites move, unless a sum has noise or the site allows
    it."""
    task, party = run.task, run.env.sums
    rows = token_rows(document.head, task.plan.upload.resolve(blocks)) if task.in_exact_sum else []
    name = min((block.name for block in rows), default="")
    detail = f"a row of {name} that this site alone moves could be read from the sum"
    require(not rows or (party is not None and party.embeddings), "secure_sums.embeddings", detail)


def require_memory(run: TaskRun, model: Model, four_bits: frozenset[str]) -> None:
    """Raise TaskFailure, before anything large is fetched, if the device cannot hold what the task needs."""
    task, device = run.task, run.env.device
    if device.type == "meta":
        # The executor's processes have the model. Each looks for itself.
        return
    # A method that chooses among the plan's blocks may itself fit its choice to the memory.
    fixed = task.kind == "train" and type(run.half(model)).select is WorkerHalf.select
    trained = task.plan.train.resolve(model.blocks) if fixed else ()
    shards = run.env.setup.ranks.shards
    needed, free = needed_bytes(model.blocks, trained, task.training, four_bits, shards), free_bytes(device)
    structlog.get_logger("worker").info("memory", needed_bytes=needed, free_bytes=free, device=str(device))
    if needed > free:
        raise TaskFailure(
            "too-little-memory",
            f"the task needs {needed} bytes on {device}: the model, gradients and moments of {len(trained)} trained "
            f"blocks, and a margin; {free} are free, {needed - free} too few",
        )


def load(run: TaskRun, fetched: Fetched) -> Loaded:
    """Load the version into a model, without the site's private state (see `Loaded.personalise`).

    Raises TaskFailure, PolicyViolation, Problem, and the exceptions of the method's worker half.
    """
    env, task = run.env, run.task
    last = env.models.take(task.run, task.model, fetched.four_bits)
    if not fetched.is_whole:
        last = None
    # Only once the version is here, so that a false claim of a large model allocates no memory.
    built = last or _built(run, fetched)
    _fill(run, fetched, built, is_new=built is not last)
    seed_everything(run.training_seed)
    half = run.half(fetched.document)
    context = LocalTaskContext(
        built.model,
        fetched.document.head,
        task.plan,
        built.blocks,
        without_moments(without_feedback(fetched.kept)),
        fetched.server_state,
        objective=objective_of(task.training, fetched.document, env.device, private=task.privacy is not None),
        training=task.training,
        held=built.held,
        images=built.images,
    )
    return Loaded(fetched.document, built, half, context, fetched.bases, Moments.of(fetched.kept))


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


def _fill(run: TaskRun, fetched: Fetched, built: Built, *, is_new: bool) -> None:
    """Write the version's values into a model."""
    built.held.written.clear()
    built.images.begin({name: fetched.content(base.block) for name, base in fetched.bases.items()})
    tensors, layers, ranks = named_tensors(built.model), four_bit_layers(built.model), run.env.setup.ranks
    for name, group in groupby(fetched.bases.values(), key=lambda base: base.block.tensor):
        bases = list(group)
        content = tuple(fetched.content(base.block) for base in bases)
        layer = layers.get(name)
        if layer.content == content if layer else built.held.has(name, tensors[name], content):
            continue
        whole = layer.weight if layer else tensors[name] if ranks.shards > 1 else None
        matrix = tensors
        if whole is not None:
            matrix = {name: torch.empty(whole.shape, dtype=whole.dtype, device=run.env.device)}
        for base in bases:
            run.check()
            _write(matrix, base, is_checked=not is_new and base.block.name in fetched.document.external)
        if layer:
            layer.fill(matrix[name], content)
        elif whole is not None:
            ranks.keep_shard(whole, matrix[name])
        else:
            built.held.note(name, tensors[name], content)


def _write(tensors: Mapping[str, torch.Tensor], base: BlobTensor, *, is_checked: bool) -> None:
    """Write a block's values, read into the tensor's memory if that is possible. Raises TaskFailure for values that
    are not finite, unless they are known to be."""
    block, memory = base.block, memory_of(tensors, base.block)
    pieces = [base.values()] if memory is None else base.read_into(memory)
    for values in pieces:
        if not is_checked:
            _require_finite(block.name, values)
        if memory is None:
            write_block(tensors, block, values)


def _built(run: TaskRun, fetched: Fetched) -> Built:
    """Build the run's model, already checked by `fetch`."""
    task = run.task
    # A block that is not fetched keeps the value that the seed gives it.
    random_weights = len(fetched.bases) < len(fetched.blocks)
    model = laid_out(fetched.document, fetched.mapping, seed=run.training_seed, random_weights=random_weights)
    device = run.env.device
    put_four_bits(model, fetched.four_bits)
    run.env.setup.ranks.shard(model, device)
    allocate(model, device)
    return Built(task.run, task.model, model, fetched.blocks, structure_of(model), fetched.four_bits)


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
        return run.env.models.document(Model, digest, lambda: Model.read(run.document(digest)))


def _read_manifest(run: TaskRun) -> Manifest:
    """Return the manifest of the task's version. Raises TaskFailure."""
    digest = run.task.version.digest
    with failing_as("invalid-version"):
        run.fetch(digest, MAX_DOCUMENT_BYTES)
        manifest = run.env.models.document(
            Manifest, digest, lambda: Manifest.read(run.document(digest), run.document)
        )
        if manifest.root:
            # Of a manifest read before, the root is fetched too: the cache keeps what tasks use.
            run.fetch(manifest.root, MAX_DOCUMENT_BYTES)
    return manifest


def _fetch_memory(run: TaskRun, manifest: Manifest) -> dict[str, Array]:
    """Fetch the server state that the plan requests. Raises PolicyViolation, TaskFailure."""
    entries: dict[str, ServerTensor] = {}
    for pattern in run.task.plan.server_state:
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
        _require_finite(name, arrays[name])
    return arrays


def _require_finite(name: str, values: Array) -> None:
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
        convert = partial(converted_blocks, document.config, document.head)
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
