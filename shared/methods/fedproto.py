"""FedProto: sites share the mean features of each class, its prototypes, and no part of their models.

Tan et al. 2022, FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI, arXiv 2105.00243. With h
the features of an example and C_y the global prototype of its class, of D dimensions, a site's own model trains with

    loss = f_k + lam * mean over a batch of |h - C_y|^2 / D,

equation (7) with the distances of single examples, as in the authors' code; a class without a prototype adds nothing.
The site then sends the mean features of its examples of each class (equation 3) and their numbers n_kj. The server's
C_j is the mean of these weighted by n_kj, which equation (6) divides by the number of sites once more: that would
shrink it. The features are the input of the model's head. A site counts with at most `max_examples` examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Extra,
    ExtraArray,
    Guard,
    LocalResult,
    Method,
    MethodSettings,
    Participant,
    Plan,
    RunInfo,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    Update,
    WorkerHalf,
)
from tessera.shared.model.selectors import NOTHING, Selector
from tessera.shared.schema import Compatibility
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array

if TYPE_CHECKING:
    import torch

PROTOTYPES, COUNTS = "prototypes", "counts"


class FedProtoSettings(MethodSettings):
    lam: float = Field(default=1.0, ge=0, le=1000, description="weight of the distance to the global prototypes")


def _matrices(run: RunInfo) -> list[tuple[int, ...]]:
    return [block.shape for block in run.blocks if block.role == "head" and len(block.shape) == 2]


def _shape(run: RunInfo) -> tuple[int, int]:
    return _matrices(run)[-1][0], _matrices(run)[0][1]  # [classes, features]


class FedProtoCoordinator(CoordinatorHalf[FedProtoSettings]):
    buffered = Compatibility("prototypes of different versions cannot be averaged")
    unequal_steps = Compatibility("no step is merged, which local work could divide")
    regional = Compatibility("prototypes are of single sites")

    def start(self, state: State) -> State:
        if not _matrices(self.run) or self.run.head not in (None, "image-classification", "text-classification"):
            raise UnsupportedRun("fedproto needs a model that gives each example one class: choose such a head")
        return replace(state, server_state={PROTOTYPES: ArrayTensor(np.zeros(_shape(self.run), np.float32))})

    def plan_for(self, state: State, worker: Participant) -> Plan:
        shape = _shape(self.run)
        sent = (ExtraArray(name=PROTOTYPES, shape=shape), ExtraArray(name=COUNTS, shape=shape[:1]))
        return Plan(stage="prototypes", upload=NOTHING, extra=sent, server_state=(PROTOTYPES,))

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        last = to_array(state.server_state[PROTOTYPES])
        sums, counts = np.zeros(last.shape), np.zeros((len(last), 1))
        for update in updates:
            own = to_array(update.extra[COUNTS]).clip(min=0).astype(np.float64)[:, None]
            own *= min(1.0, update.examples / max(own.sum(), 1.0))
            sums += own * to_array(update.extra[PROTOTYPES])
            counts += own
        merged = np.divide(sums, counts, out=last.astype(np.float64), where=counts > 0).astype(np.float32)
        return replace(state.advanced({}), server_state={PROTOTYPES: ArrayTensor(merged)})

    def check_merge(self, guard: Guard) -> None:
        raise UnsupportedRun(f"fedproto merges prototypes, past {guard}: leave out {guard}, or choose another method")


class FedProtoWorker(WorkerHalf[FedProtoSettings]):
    loss_by_example = True
    one_example_per_row = True

    def private(self) -> Selector:
        return self.run.trainable

    def _prototypes(self, context: TaskContext) -> Array:
        """Return the mean features of each class, [classes, features]. A task that only evaluates has none."""
        held = context.server_state.get(PROTOTYPES)
        if held is None or held.shape != _shape(self.run):
            raise UnsupportedRun("fedproto needs prototypes [classes, features] of this model, and the task has none")
        return held

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"]
        if labels.ndim != 1 or labels.is_floating_point():
            raise UnsupportedRun("fedproto needs one class for each example: choose another method for these labels")
        output, features = context.forward_with_features(batch)  # features: [examples, features]
        near = features.new_tensor(self._prototypes(context))[labels.clamp(min=0)]
        known = (labels >= 0) & near.any(dim=1)  # [examples]
        return output.loss + self.settings.lam * ((features - near).square().mean(dim=1) * known).mean()

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        sums = np.zeros(self._prototypes(context).shape)
        counts = np.zeros(len(sums))
        for batch in context.batches:
            labelled = batch["labels"] >= 0
            labels, features = batch["labels"][labelled], context.features(batch, {})[labelled].float()
            np.add.at(sums, labels.cpu().numpy(), features.cpu().numpy())
            counts += np.bincount(labels.cpu().numpy(), minlength=len(counts))
        means = sums / np.maximum(counts, 1)[:, None]
        extra = {
            PROTOTYPES: Extra(means.astype(np.float32), counts),
            COUNTS: Extra(counts.astype(np.float32), counts),
        }
        return replace(super().collect(context, selected, stats), extra=extra)


METHOD = Method(
    name="fedproto",
    good_for="sites that keep their own models and share what a class looks like to them",
    sends="the mean features of each class and its number of examples",
    settings=FedProtoSettings,
    coordinator=FedProtoCoordinator,
    worker=FedProtoWorker,
    source="Tan et al., FedProto, AAAI 2022, arXiv 2105.00243, equations (3), (6) and (7)",
)
