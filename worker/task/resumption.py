"""The checkpoint of a task: what has to be equal for it to be resumed, and when it ends."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version

from tessera.shared.api.tasks import MERGING, Task
from tessera.shared.client.transport import may_pass
from tessera.shared.problems import Forbidden, LeaseLost, Problem, Unauthenticated
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.version import VERSION
from tessera.worker.state.atomic_files import disk_error
from tessera.worker.state.audit import StateRolledBack
from tessera.worker.state.checkpoints import CheckpointKey, TaskCheckpoint
from tessera.worker.task.environment import TaskEnvironment
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.upload import HeldUpdate

SETTINGS = {
    "training",
    "method",
    "privacy",
    "codec",
    "normalization",
    "upload_budget",
    "upload_seconds",
    "seed",
    "rounds",
    # The training seed follows from them too.
    *MERGING,
}
"""The fields of a task that training depends on, beside those that a key names."""

version_of = cache(version)
"""A library's version, which is looked for on disk once."""

OFFERED_AGAIN = (Stopped, LeaseLost, Unauthenticated, Forbidden, StateRolledBack)
"""Ends of a task after which this worker may get it again."""


def key_of(env: TaskEnvironment, task: Task) -> CheckpointKey:
    """Return the key of a task's checkpoints. The contents of its data set must be known in `env.contents`."""
    settings = task.model_dump(mode="json", include=SETTINGS)
    bits = env.executor.compute.base_bits
    used = {"kornia": task.training.augments, "bitsandbytes": bits is not None}
    libraries = ["torch", "transformers", *(name for name, is_used in used.items() if is_used)]
    return CheckpointKey(
        run=task.run,
        round=task.round,
        task=task.id,
        model=task.model,
        base=task.version.digest,
        plan=digest_of(canonical(task.plan)),
        settings=digest_of(json.dumps(settings, sort_keys=True).encode()),
        data=f"{task.dataset} {env.contents[task.dataset]}",
        libraries=", ".join(f"{name} {version_of(name)}" for name in libraries) + f", tessera {VERSION}",
        device=" ".join([env.executor.kind, *(["base in 4 bits"] if bits else [])]),
    )


def checkpoint_of(env: TaskEnvironment, task: Task) -> TaskCheckpoint | None:
    """Return the task's checkpoint, to resume from and to write; None if this worker writes none."""
    if env.checkpoints is None or env.ledger is None or math.isinf(env.checkpoint_seconds):
        return None
    return env.checkpoints.of_task(key_of(env, task))


@contextmanager
def ending(checkpoint: TaskCheckpoint | HeldUpdate | None) -> Iterator[None]:
    """Remove what is stored of a task when the block ends, unless the task may be offered to this worker again."""
    try:
        yield
    except OFFERED_AGAIN:
        raise
    except Exception as fault:
        # A worker whose disk is full gives the task back.
        if checkpoint and not disk_error(fault) and not (isinstance(fault, Problem) and may_pass(fault)):
            checkpoint.remove()
        raise
    if checkpoint:
        checkpoint.remove()
