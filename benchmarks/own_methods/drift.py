"""A round without training: each worker moves its weights about as far as an epoch of AdamW would, at random.

What is exchanged then looks to a codec like what training leaves, and costs next to nothing to make.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    Participant,
    Phase,
    Plan,
    State,
    TaskContext,
    TrainingStats,
    WorkerHalf,
)
from tessera.shared.model.selectors import EVERYTHING, Selector
from tessera.shared.tensors.lazy import CHUNK, Array

LEARNING_RATE = 2e-5
STEPS = 50
"""AdamW's steps are about a learning rate long each, so that after so many a weight has moved by the root of it."""


class DriftSettings(MethodSettings):
    sent: Selector = EVERYTHING


class DriftCoordinator(CoordinatorHalf[DriftSettings]):
    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(train=self.settings.sent, upload=self.settings.sent)


class DriftWorker(WorkerHalf[DriftSettings]):
    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return ()

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        # The task's seed is in the global state, so that each worker moves elsewhere.
        steps = drawn(random.getrandbits(32))
        blocks = context.plan.upload.resolve(context.blocks)
        return LocalResult({block.name: moved(context.read(block), steps) for block in blocks})


def drawn(seed: int) -> Array:
    """Random steps for one chunk of elements; a codec, which sees no further than a chunk, sees no repetition."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(CHUNK, dtype=np.float32) * np.float32(LEARNING_RATE * STEPS**0.5)


def moved(values: Array, steps: Array) -> Array:
    """The values, moved in place chunk by chunk."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        part += steps[: part.size]
    return values


METHOD = Method(
    name="drift",
    settings=DriftSettings,
    coordinator=DriftCoordinator,
    worker=DriftWorker,
    source="none: for benchmarks",
)
