"""Memory of a round: at a worker, by the product's own count; at the coordinator, measured on a synthetic merge."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from benchmarks.evidence.transfer.models import PROMPTS, RANK, Large, activation_bytes, table
from benchmarks.evidence.transfer.traffic import Arm, traffic
from tessera.shared.aggregation.mean import average
from tessera.shared.model.spec import MODALITIES, Fusion, Lora, Model
from tessera.shared.run_settings import Training
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import CHUNK, Array, chunk_counts
from tessera.worker.model.device_memory import GRADIENT_BYTES, MARGIN_BYTES, MOMENT_BYTES, needed_bytes
from tessera.worker.model.four_bits import four_bit_tensors
from tessera.worker.model.prompts import fused_prompts, prompts_of

ADAMW = Training()
MOMENTS = 2
ELEMENT_BYTES = 4


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

    The first three are those that a worker compares with its free memory before a task, and those of a site's
    private modules. `four_bits` stores the
    matrices of a frozen base beside adapters in 4 bits.
    """
    blocks = table(large, arm.variant)
    trained = traffic(arm, large).trained
    # Prompts find where a text ends by its tokens, so that their pass needs values.
    model = large.built(arm.variant, "cpu" if arm.variant in PROMPTS else "meta")
    private = _fused(model) if arm.method == "pfeddc" else nn.Module()
    own = sum(parameter.numel() for parameter in private.parameters())
    of_blocks = sum(block.numel for block in trained)
    lora = Lora(rank=RANK, alpha=2 * RANK) if arm.variant == "lora" else None
    document = Model(config=dict(large.config), head=large.head, blocks=blocks, lora=lora)
    matrices = four_bit_tensors(document) if four_bits else frozenset()
    counted = needed_bytes(blocks, trained, ADAMW, matrices) - MARGIN_BYTES
    return WorkerMemory(
        counted - of_blocks * (GRADIENT_BYTES + MOMENTS * MOMENT_BYTES) + own * ELEMENT_BYTES,
        GRADIENT_BYTES * (of_blocks + own),
        MOMENTS * MOMENT_BYTES * (of_blocks + own),
        activation_bytes(large, model, trained, private),
    )


def _fused(model: PreTrainedModel) -> nn.Module:
    """Let a site's local prompts and cross-attention fuse with the model's prompts, as in pFedDC. Return them."""
    tokens = prompts_of(model)
    if tokens is None:
        raise ValueError("the model has no prompts to fuse with: build a variant that has")
    fused = fused_prompts(tokens, MODALITIES, Fusion(), "global")
    tokens.transforms = {modality: partial(fused.fuse, modality) for modality in MODALITIES}
    return nn.ModuleList([fused.local, fused.fusion])


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
