"""The stage that checks a task's model before anything large is fetched: block table, bits, pieces and memory."""

import structlog

from tessera.shared.methods.base import UnsupportedRun, WorkerHalf
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Model
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.model.build import check_model
from tessera.worker.model.device_memory import free_bytes, needed_bytes
from tessera.worker.model.four_bits import four_bit_tensors, require_frozen
from tessera.worker.model.layouts import MappingFile
from tessera.worker.task.environment import facts_of
from tessera.worker.task.handover import CheckedModel
from tessera.worker.training.optimization.micro_batch import require_divisible
from tessera.worker.training.ranks import require_shardable


def check(
    local: LocalTask,
    document: Model,
    mapping: MappingFile | None,
    dataset: DatasetInfo,
    *,
    elsewhere: bool = False,
) -> CheckedModel:
    """Return the model's block table, computed here, once the task can be executed with it.

    The memory of this machine says nothing of a task that is executed `elsewhere`.

    Raises ConfigError, ModelMismatch, UnknownArchitecture, UnsupportedRun, TaskFailure and the exceptions of
    `local.check`.
    """
    task, setup, tables = local.task, local.setup, local.cache.tables
    key = (task.model, setup.compute.base_bits)
    if key not in tables:
        if local.sandbox:
            local.sandbox.require(document, mapping, local.check)
        blocks = check_model(document, mapping)
        bits = four_bit_tensors(document, mapping) if setup.compute.base_bits else ()
        tables.clear()
        tables[key] = CheckedModel(blocks, frozenset(bits))
    checked, is_training, private = tables[key], task.trains, task.privacy is not None
    if document.lora and document.lora.dora:
        _require_plain(local)
    if setup.compute.base_bits:
        merged = coordinator_half(task.method, facts_of(task, document)).merged_beside
        require_frozen(document, checked.four_bits, task.plan, merged, is_training=is_training)
    if setup.compute.shard:
        require_shardable(local.half(document), task.plan, document, task.training, private=private)
    if is_training and not private:
        require_divisible(local.half(document), checked.blocks, dataset, task.training, setup.micro_batch)
    is_whole = len(task.plan.fetch.resolve(document.blocks)) == len(checked.blocks)
    if not (elsewhere or (is_whole and local.cache.models.holds(task.run, task.model, checked.four_bits))):
        require_memory(local, document, checked.four_bits)
    return checked


def _require_plain(local: LocalTask) -> None:
    """Raise UnsupportedRun for DoRA's adapters, which read whole matrices, where a task cannot let them."""
    task, compute = local.task, local.setup.compute
    beside = {"privacy": task.privacy, "compute.base_bits": compute.base_bits, "compute.shard": compute.shard}
    if found := [name for name, is_set in beside.items() if is_set]:
        raise UnsupportedRun(
            f"the model has DoRA's adapters, which read whole matrices, and {' and '.join(found)} cannot: create the "
            "model without --dora, or leave the setting out"
        )


def require_memory(local: LocalTask, model: Model, four_bits: frozenset[str]) -> None:
    """Raise TaskFailure, before anything large is fetched, if the device cannot hold what the task needs."""
    task, device = local.task, local.device
    # A method that chooses among the plan's blocks may itself fit its choice to the memory.
    fixed = task.trains and type(local.half(model)).select is WorkerHalf.select
    trained = task.plan.train.resolve(model.blocks) if fixed else ()
    shards = local.setup.ranks.shards
    needed, free = needed_bytes(model.blocks, trained, task.training, four_bits, shards), free_bytes(device)
    structlog.get_logger("worker").info("memory", needed_bytes=needed, free_bytes=free, device=str(device))
    if needed > free:
        raise TaskFailure(
            "too-little-memory",
            f"the task needs {needed} bytes on {device}: the model, gradients and moments of {len(trained)} trained "
            f"blocks, and a margin; {free} are free, {needed - free} too few",
        )
