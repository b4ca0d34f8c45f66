"""Memory of a round: at a worker, by the product's own count; at the coordinator, measured on a synthetic merge."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.arrays import Array
from evidence.transfer.models import RANK, Large, activation_bytes, table
from evidence.transfer.traffic import Arm, traffic
from tessera.shared.aggregation.mean import average
from tessera.shared.methods.pfeddc import fused, fusion_weights
from tessera.shared.methods.promptfl import local_prompts, parameters
from tessera.shared.model.spec import MODALITIES, Fusion, Lora, Modality, Model
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import CHUNK, chunk_counts
from tessera.worker.model.device_memory import GRADIENT_BYTES, MOMENT_BYTES
from tessera.worker.model.four_bits import four_bit_tensors, stored_bytes
from tessera.worker.model.prompts import prompts_of

MOMENTS = 2


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes on a worker's device."""

    weights: int
    gradients: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.activations


def worker_memory(arm: Arm, large: Large, *, four_bits: bool = False) -> WorkerMemory:
    """Return a training site's memory with AdamW, float32, and the model's batch.

    Weights, gradients and moments of the blocks are what a worker compares with its free memory before a task. Those
    of a site's private modules, which it leaves out, are added. `four_bits` stores the matrices of a frozen base
    beside adapters in 4 bits.
    """
    blocks, trained = table(large, arm.variant), traffic(arm, large).trained
    model = large.built(arm.variant, large.device)
    private = _fuse_prompts(model) if arm.method == "pfeddc" else nn.Module()
    elements = sum(block.numel for block in trained) + sum(each.numel() for each in private.parameters())
    lora = Lora(rank=RANK, alpha=2 * RANK) if arm.variant == "lora" else None
    document = Model(config=dict(large.config), head=large.head, blocks=blocks, lora=lora)
    matrices = four_bit_tensors(document) if four_bits else frozenset()
    return WorkerMemory(
        stored_bytes(blocks, matrices) + sum(each.nbytes for each in private.parameters()),
        GRADIENT_BYTES * elements,
        MOMENTS * MOMENT_BYTES * elements,
        activation_bytes(large, model, trained, private),
    )


def _fuse_prompts(model: PreTrainedModel) -> nn.Module:
    """Fuse a model's prompts with a site's own by cross-attention, as pFedDC does. Return the site's modules."""
    tokens = prompts_of(model)
    if tokens is None:
        raise ValueError("the model has no prompts to fuse with: build a variant that has")
    prompts: dict[Modality, Tensor] = {each: tokens.get_parameter(each).detach() for each in MODALITIES}
    local, fusion = local_prompts(prompts, "global"), Fusion()
    weights = nn.ModuleDict(
        {m: parameters(fusion_weights(fusion, own.shape[1]).items()) for m, own in prompts.items()}
    )

    def insert(modality: Modality, own: Tensor) -> Tensor:
        of_tower: Any = weights[modality]
        return fused(fusion, of_tower, own, local[modality])

    tokens.insert({modality: partial(insert, modality) for modality in MODALITIES})
    return nn.ModuleList([local, weights])


# ---------------------------------------------------------------- the coordinator


@dataclass(frozen=True)
class _Stream:
    """A float32 tensor whose chunks are made as they are read, as from a file."""

    elements: int
    value: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    @property
    def dtype(self) -> DType:
        return "F32"

    def chunks(self) -> Iterator[Array]:
        for count in chunk_counts(self.elements):
            yield np.full(count, self.value, np.float32)


def merge_peak_bytes(updates: int, chunks: int) -> int:
    """Return the peak of memory in which updates of a number of chunks each become the next version, which is read
    chunk by chunk as when it is stored."""
    size = chunks * CHUNK
    senders = [(1.0, {"block": _Stream(size, float(number))}) for number in range(updates)]
    tracemalloc.start()
    try:
        merged = average({"block": _Stream(size, 0.0)}, senders, "participants")
        for chunk in merged["block"].chunks():
            del chunk
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
