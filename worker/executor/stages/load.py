"""The stage that loads a fetched version into a model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from tessera.shared.methods.base import REFERENCE, WorkerHalf
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import to_array
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.run_cache import BuiltModel, structure_of
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import activate_adapters, allocate, laid_out, memory_of, write_block
from tessera.worker.model.forward import Preference, objective_of
from tessera.worker.model.four_bits import four_bit_layers, put_four_bits
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.task.fetch import require_finite
from tessera.worker.task.handover import FetchedVersion
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.moments import Moments, without_moments
from tessera.worker.training.randomness import seed_everything


@dataclass(frozen=True)
class PreparedTask:
    """A task with its version loaded."""

    document: Model
    built: BuiltModel
    half: WorkerHalf[Any]
    context: LocalTaskContext
    bases: Mapping[str, BlobTensor]
    """The version's value of each fetched block."""
    moments: Moments
    """The optimizer's moments from earlier rounds."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of each training with the model, with the rank of its adapters if sites' ranks differ."""
        return {**self.built.metrics, **self.context.plan.rank_metric(self.document.lora)}

    def personalise(self) -> None:
        """Restore the site's private state into the model and let the method set it up."""
        self.context.restore(self.half.private())
        self.half.setup(self.context)

    def is_changed(self) -> bool:
        """Return True if any fetched block differs from the version. Matrices in 4 bits never change."""
        return any(
            self.context.read(base.block).tobytes() != to_array(base).tobytes()
            for base in self.bases.values()
            if base.block.tensor not in self.built.four_bits
        )


def load(local: LocalTask, fetched: FetchedVersion) -> PreparedTask:
    """Load the version into a model, without the site's private state (see `PreparedTask.personalise`).

    Raises TaskFailure, PolicyViolation, Problem, and the exceptions of the method's worker half.
    """
    task = local.task
    last = local.cache.models.take(task.run, task.model, fetched.four_bits)
    if not fetched.is_whole:
        last = None
    # Only once the version is here, so that a false claim of a large model allocates no memory.
    built = last or _built(local, fetched)
    _fill(local, fetched, built, is_new=built is not last)
    seed_everything(local.task.seed)
    half = local.half(fetched.document)
    lora = fetched.document.lora
    if lora and lora.ranks:
        rank = half.computed_rank if task.trains else None
        activate_adapters(built.model, lora.parts_within(rank or lora.rank))
    context = LocalTaskContext(
        built.model,
        fetched.document.head,
        task.plan,
        built.blocks,
        without_moments(fetched.kept),
        fetched.server_state,
        objective=objective_of(task.training, fetched.document, local.device, private=task.privacy is not None),
        training=task.training,
        held=built.held,
        images=built.images,
    )
    if task.training.loss == "dpo":
        context = preferring(context, dora=lora is not None and lora.dora)
    return PreparedTask(fetched.document, built, half, context, fetched.bases, Moments.of(fetched.kept))


def preferring(context: LocalTaskContext, *, dora: bool) -> LocalTaskContext:
    """Return the context of a task that learns preferences: each pair of texts is an example of two classes.

    The reference has the adapters in the server state, which are zero if there are none. Raises TaskFailure if only
    some are there: the model's own would be part of the reference. DoRA has magnitudes, which are never zero.
    """
    state = context.server_state.items()
    given = {name.removeprefix(REFERENCE): each for name, each in state if name.startswith(REFERENCE)}
    adapters = {block.name for block in context.blocks if block.role == "adapter"}
    if (given or dora) and (odd := sorted(given.keys() ^ adapters)):
        raise TaskFailure("invalid-version", f"the reference and the model have different adapters: {odd[:8]}")
    reference = context.tensors(given)
    if not given:
        # Adapters whose B is zero change nothing. A single number stands for all.
        named = named_tensors(context.model).items()
        reference = {name: each.new_zeros(()).expand(each.shape) for name, each in named if ".lora_B." in name}
    preference = Preference(beta=context.training.dpo_beta, reference=reference)
    return replace(context, head="text-classification", objective=preference)


def _fill(local: LocalTask, fetched: FetchedVersion, built: BuiltModel, *, is_new: bool) -> None:
    """Write the version's values into a model."""
    built.held.written.clear()
    built.images.begin({name: fetched.content(base.block) for name, base in fetched.bases.items()})
    tensors, layers, ranks = named_tensors(built.model), four_bit_layers(built.model), local.setup.ranks
    for name, group in groupby(fetched.bases.values(), key=lambda base: base.block.tensor):
        bases = list(group)
        content = tuple(fetched.content(base.block) for base in bases)
        layer = layers.get(name)
        if layer.content == content if layer else built.held.has(name, tensors[name], content):
            continue
        whole = layer.weight if layer else tensors[name] if ranks.shards > 1 else None
        matrix = tensors
        if whole is not None:
            matrix = {name: torch.empty(whole.shape, dtype=whole.dtype, device=local.device)}
        for base in bases:
            local.check()
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
            require_finite(block.name, values)
        if memory is None:
            write_block(tensors, block, values)


def _built(local: LocalTask, fetched: FetchedVersion) -> BuiltModel:
    """Build the run's model, already checked."""
    task = local.task
    # A block that is not fetched keeps the value that the seed gives it.
    random_weights = len(fetched.bases) < len(fetched.blocks)
    model = laid_out(fetched.document, fetched.mapping, seed=local.task.seed, random_weights=random_weights)
    device = local.device
    put_four_bits(model, fetched.four_bits)
    local.setup.ranks.shard(model, device)
    allocate(model, device)
    return BuiltModel(task.run, task.model, model, fetched.blocks, structure_of(model), fetched.four_bits)
