"""The memory of a rank that keeps a part of a model's parameters. The other rank of its group does not exist."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import MethodSpec
from tessera.shared.tensors.lazy import as_bytes
from tessera.worker.compute import Compute
from tessera.worker.executor.group import Group, GroupContext
from tessera.worker.executor.sharding import bytes_here, shard
from tessera.worker.executor.stages.load import load
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.governance.site_rules import SiteRules
from tessera.worker.model.build import laid_out
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.task.handover import FetchedVersion
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.worker.executor.test_equal_results import CPU, GPT2, model_of
from tests.worker.executor.test_folder import TASK

SHARD = Compute(shard=True)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """A rank of a group of two, which sends nothing: the first, or that of the test's parameter."""
    dist.init_process_group("fake", store=FakeStore(), rank=getattr(request, "param", 0), world_size=2)
    made = Group(Path(), b"key")
    made.sharded = True
    yield made
    dist.destroy_process_group()


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made within the block, or looked into there, have taken at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                key = storage._cdata
                if key not in self._live:
                    self._live[key] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, key, None)
        self.most = max(self.most, sum(self._live.values()))
        return made


def loading(folder: Path, group: Group) -> tuple[LocalTask, FetchedVersion]:
    """A task in this rank, and its version."""
    start = model_of(GPT2, "causal-lm")
    blocks = {block.name: block for block in start.model.blocks}
    bases = {
        name: BlobTensor(folder / name, blocks[name], data=bytes(as_bytes(values)))
        for name, values in start.values.items()
    }
    manifest = Manifest(blocks=dict.fromkeys(blocks, f"sha256:{'c' * 64}"))
    unused: Any = SimpleNamespace(task=None)
    task = TASK.model_copy(update={"method": MethodSpec(name="fedavg")})
    setup = TrainingSetup(CPU, None, SHARD, group)
    local = LocalTask(task, SiteRules(), unused, setup, RunCache(), folder, lambda: None, Report())
    return local, FetchedVersion(start.model, None, manifest, start.model.blocks, bases)


def test_one_tensor_at_a_time_is_whole_while_a_rank_loads_its_part(tmp_path: Path, group: Group) -> None:
    local, fetched = loading(tmp_path, group)
    built = load(local, fetched).built
    parameters = list(built.model.parameters())
    own, whole = bytes_here(built.model), sum(each.nbytes for each in parameters)
    assert own == whole / 2
    local.cache.models.keep(built)
    with LiveBytes() as live:
        load(local, fetched)
    # Beside its part, the tensor, and its values in the version's file.
    assert own < live.most <= own + 2 * max(each.nbytes for each in parameters) < whole


@pytest.mark.parametrize("group", [0, 1], indirect=True)
def test_the_first_rank_alone_copies_what_a_method_collects(tmp_path: Path, group: Group) -> None:
    found = load(*loading(tmp_path, group))
    context = GroupContext.of(found.context, group)
    block = next(block for block in found.built.blocks if block.role == "norm" and block.name.endswith("weight"))
    read = context.read(block)
    assert (read.shape, read.any()) == (block.shape, group.is_first)


def test_a_sharded_model_is_freed_by_a_collection(group: Group) -> None:
    start = model_of(GPT2, "causal-lm").model
    model = laid_out(start, random_weights=False)
    shard(model, CPU, 2)
    freed = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert freed() is not None
    finally:
        gc.enable()
    gc.collect()
    assert freed() is None


class Layer(GradientCheckpointingLayer):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))
        self.parts = nn.ModuleList(parts)


def test_layers_within_layers_are_divided_too(group: Group) -> None:
    model = nn.Sequential(Layer(Layer(), Layer()), nn.Linear(2, 2))
    shard(model, CPU, 2)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert bytes_here(model) == sum(each.nbytes for each in model.parameters()) / 2
