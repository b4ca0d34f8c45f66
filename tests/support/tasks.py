"""One task as the workbench does it, without coordinator, cache or files: for tests of what a method computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shared.methods import Chosen, coordinator_half, worker_half
from shared.methods.contract import Harvest, Participant, Plan, RunFacts, State
from shared.tensors import Array
from shared.wire import Training
from worker.blockmap import block_table
from worker.data import Dataset
from worker.models import instantiate
from worker.trainer import Batches, Trainer, seed_everything
from worker.work import LocalWork

CPU = torch.device("cpu")
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_labels": 3,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def images(count: int = 24) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    return Dataset({"pixel_values": pixels, "labels": torch.randint(0, 3, (count,), generator=generator)})


def one_task(
    method: str,
    settings: Mapping[str, Any] | None = None,
    *,
    round_number: int = 0,
    start: Mapping[str, Array] | None = None,
    vault: Mapping[str, Array] | None = None,
    memory: Mapping[str, Array] | None = None,
    plan: Plan | None = None,
    dataset: Dataset | None = None,
    **training: Any,
) -> tuple[LocalWork, Harvest]:
    """Trains the small ViT, on `images()` and as the method asks in this round unless told otherwise; what is left of
    it, and its harvest."""
    model = instantiate(VIT, "image-classification", seed=1)
    wanted = Training.model_validate({"batch_size": 8, "learning_rate": 0.05, **training})
    facts = RunFacts(block_table(model), rounds=10, training=wanted)
    chosen = Chosen(name=method, settings=dict(settings or {}))
    worker = Participant("a/w", 24)
    plan = plan or coordinator_half(chosen, facts).plan_for(State(round_number, {}), worker)
    work = LocalWork(model, "image-classification", plan, facts.blocks, dict(vault or {}), dict(memory or {}))
    half = worker_half(chosen, facts)
    for block in facts.blocks:
        if start:
            work.write(block, start[block.name])
    seed_everything(0)
    work.restore(half.private())
    half.prepare(work)
    data = dataset or images()
    selected = half.select(work, Batches(data, wanted.batch_size, CPU))
    tally = Trainer(half, work, wanted, CPU, lambda: None).train(half.phases(work, selected), data, 0)
    return work, half.harvest(work, selected, tally)
