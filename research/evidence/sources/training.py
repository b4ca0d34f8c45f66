"""Training on one machine, for models that are adapted before a federation and for the gate's centralised ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi

import numpy as np
import torch
from torch import Tensor, nn

from evidence.sources.sites import Indices
from tessera.worker.data.dataset import Dataset

WARM_UP_STEPS = 20
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.01
HEAD_FACTOR = 10
"""The classifier's learning rate over that of the other weights."""
HEAD = "classifier."
PREDICTED_AT_ONCE = 250


@dataclass(frozen=True)
class Budget:
    """Steps of AdamW with batches of `batch_size`, at a rate that rises linearly and falls as a cosine."""

    steps: int
    batch_size: int
    rate: float


def train(model: nn.Module, dataset: Dataset, budget: Budget, seed: int) -> float:
    """Train a classifier of transformers in place. Return the mean loss of the last tenth of the steps.

    Frozen weights stay. The order of examples is the seed's.
    """
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for name, weight in trained if name.startswith(HEAD) == head], "lr": budget.rate * factor}
        for head, factor in ((True, HEAD_FACTOR), (False, 1))
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, budget.steps))
    model.train()
    losses = []
    for rows in _batches(dataset.examples, budget, seed):
        loss: Tensor = model(**dataset.read(rows)).loss
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_((weight for _, weight in trained), CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of its rate that a step from 0 has."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + cos(pi * step / steps)) / 2


def _batches(examples: int, budget: Budget, seed: int) -> Iterator[Tensor]:
    """Yield the places of each step's examples: every pass has an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(budget.steps):
        while len(order) < budget.batch_size:
            order = torch.cat([order, torch.randperm(examples, generator=generator)])
        yield order[: budget.batch_size]
        order = order[budget.batch_size :]


def predicted(model: nn.Module, dataset: Dataset) -> Indices:
    """Return the class that a classifier of transformers predicts for each example."""
    model.eval()
    parts = torch.split(torch.arange(dataset.examples), PREDICTED_AT_ONCE)
    with torch.inference_mode():
        found = [model(**dataset.read(rows)).logits.argmax(dim=-1) for rows in parts]
    return torch.cat(found).numpy()
