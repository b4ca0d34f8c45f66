"""Merging on a Ray cluster, for models that one machine is too small for (extra `ray`).

The same function over blocks as in threads: a task computes some groups of tensors from the store, and writes what
comes out to the store. Its machine therefore must reach the database and the blobs, and needs the methods that runs
use. What travels by way of Ray are digests and weights.
"""

import os

import ray

from tessera.shared.host_memory import keep_freed_memory
from tessera.shared.rounds.blob_store import BlobStore, Stored
from tessera.shared.rounds.versions import Groups, materialize
from tessera.shared.tensors.lazy import numel

TASKS_PER_CPU = 4
"""More than one, so that a machine which is slower than the others is given fewer."""


class RayEngine:
    def __init__(self, address: str | None) -> None:
        # Nobody is told that Ray is used here.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            ignore_reinit_error=True,
        )
        self._task = ray.remote(num_cpus=1)(materialize_task)

    def __call__(self, blobs: BlobStore, groups: Groups) -> list[list[Stored]]:
        """Compute and store the groups, as `materialize` does."""
        bundles = divided(groups, TASKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1))))
        running = [self._task.remote(blobs, [groups[index] for index in bundle]) for bundle in bundles]
        stored: dict[int, list[Stored]] = {}
        for bundle, found in zip(bundles, ray.get(running), strict=True):
            stored.update(zip(bundle, found, strict=True))
        return [stored[index] for index in range(len(groups))]


def materialize_task(blobs: BlobStore, groups: Groups) -> list[list[Stored]]:
    keep_freed_memory()
    return materialize(blobs, groups)


def divided(groups: Groups, count: int) -> list[list[int]]:
    """Return the groups' places in at most `count` bundles of about the same number of elements."""
    sizes = [sum(map(numel, group)) for group in groups]
    bundles: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    held = [0] * len(bundles)
    for index in sorted(range(len(groups)), key=lambda index: -sizes[index]):
        least = held.index(min(held))
        bundles[least].append(index)
        held[least] += sizes[index]
    return bundles
