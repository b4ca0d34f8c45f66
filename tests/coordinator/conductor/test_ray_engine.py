"""The same merge on a Ray cluster of several worker processes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.shared.aggregation.robust import GeometricMedian, Mean, Median, RobustRule
from tessera.shared.aggregation.server_optimizer import Adam
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import CoordinatorHalf, MethodSettings, Plan, RunInfo, Update
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.rounds.server_step import merge
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States, materialize
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor, as_bytes
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tests.support.paths import ROOT
from tests.support.storage import NOW, blobs_in

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three worker processes on this machine."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray prepends nothing to the path of its workers: they find this checkout as this process does.
    ray.init(
        num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path()}}
    )
    yield importlib.import_module("tessera.coordinator.conductor.ray_engine").RayEngine(None)
    ray.shutdown()


RULES = [
    pytest.param(Mean(), id="mean"),
    pytest.param(Median(), id="median"),
    pytest.param(GeometricMedian(), id="geometric_median"),
]


def path() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize("rule", RULES)
def test_the_version_is_that_of_one_process_bit_for_bit(
    cluster: Any, tmp_path: Path, database: Database, rule: RobustRule
) -> None:
    blobs = blobs_in(tmp_path, database)
    blocks = tuple(
        Block(tensor=f"w{index}", role="mlp", layer=0, shape=(CHUNK // 2 + index, 3), dtype="F32")
        for index in range(8)
    )
    model = Model(config={"model_type": "bert"}, head="features", blocks=blocks)
    rng = np.random.default_rng(0)
    start = {block.name: rng.normal(size=block.shape).astype(np.float32) for block in blocks}
    stored = {name: blobs.save([as_bytes(values)]) for name, values in start.items()}
    manifest = Manifest(blocks={name: blob.digest for name, blob in stored.items()})
    updates = [sent(blobs, blocks, start, rng, tmp_path / f"update-{index}") for index in range(3)]

    def next_version(states: States) -> Any:
        inspector = Inspector(blobs, states)
        received = [
            Update(f"site/{index}", 10 + index, inspector.open(digest, model, manifest, Plan()))
            for index, digest in enumerate(updates)
        ]
        half = CoordinatorHalf(MethodSettings(), RunInfo(blocks, rounds=1, robust=rule))
        return states.store(merge(half, Adam(), states.load(model, manifest, 0), received))

    found, new = next_version(States(blobs, cluster))
    assert (found, new) == next_version(States(blobs, partial(materialize, threads=2)))
    with database.transaction() as session:
        blobs.record(session, NOW, new)
    assert len(blobs.read(found.blocks["w0"])) == start["w0"].nbytes


def sent(blobs: Blobs, blocks: tuple[Block, ...], start: Any, rng: np.random.Generator, path: Path) -> str:
    changes = [
        TrainedBlock(
            block,
            ArrayTensor(start[block.name] + rng.normal(scale=1e-3, size=block.shape).astype(np.float32)),
            ArrayTensor(start[block.name]),
        )
        for block in blocks
    ]
    with path.open("wb") as file:
        write_update(file, "raw", changes)
    return blobs.save([path.read_bytes()]).digest


def test_bundles_are_of_about_the_same_size() -> None:
    engine = pytest.importorskip("tessera.coordinator.conductor.ray_engine")
    tensors = [[ArrayTensor(np.zeros(size, np.float32))] for size in (7, 1, 5, 3, 2)]
    # 7 and 2, 5, 3 and 1: the largest first, each to the bundle that has least.
    assert engine.divided(tensors, 2) == [[0, 4], [2, 3, 1]]
    assert engine.divided(tensors[:1], 8) == [[0]]
