"""Ditto: besides training the global model, each site trains a personal model that is regularized towards it.

Li et al. 2021, Fair and Robust Federated Learning Through Personalization, arXiv 2012.04221, Algorithm 1. The first
phase is FedAvg's, bit for bit, and its result is sent. The second continues the personal model v_k from the vault
(the first time from the version) on f_k(v) + lambda/2 |v - w_t|^2, where w_t is the fetched version. A worker reports
the loss of the second phase. If that diverges, the site's own model stays as it was, and the update is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    Phase,
    State,
    TaskContext,
    TrainingStats,
    WorkerHalf,
)
from tessera.shared.methods.fedprox import overshoots
from tessera.shared.model.selectors import Selector
from tessera.shared.tensors.lazy import Array

if TYPE_CHECKING:
    import torch

OWN = "own/"
"""The prefix of the personal model's blocks in the vault."""


class DittoSettings(MethodSettings):
    lam: float = Field(default=0.1, ge=0, le=1000, description="lambda: regularization of the personal model")
    own_epochs: PositiveInt | None = Field(
        default=None, le=1000, description="epochs for the personal model; the run's by default"
    )

    def epochs_left(self, most: int) -> int:
        return most - self.own_epochs if self.own_epochs else most // 2


class DittoCoordinator(CoordinatorHalf[DittoSettings]):
    def warnings(self, state: State) -> Sequence[str]:
        return () if state.round else overshoots("lam", self.settings.lam, self.run.training)


class DittoWorker(WorkerHalf[DittoSettings]):
    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected), Phase(selected, epochs=self.settings.own_epochs, name="own", personal=True)]

    def setup(self, context: TaskContext) -> None:
        self._blocks = self.run.trainable.resolve(context.blocks)
        self._version = context.read_all(self._blocks)
        self._near = context.tensors(self._version)
        self._trained: dict[str, Array] = {}
        self._held = False

    def on_phase_start(self, context: TaskContext, phase: Phase) -> None:
        self._held = phase.name == "own"
        if self._held:
            self._trained = context.read_all(self._blocks)
            self._take_own(context)

    def on_phase_diverged(self, context: TaskContext, phase: Phase) -> None:
        self._take_own(context)

    def training_state(self) -> Mapping[str, Array]:
        return self._trained

    def on_phase_resume(self, context: TaskContext, phase: Phase, state: Mapping[str, Array]) -> None:
        self.on_phase_start(context, phase)
        self._trained = dict(state)

    def personalization_phases(self, context: TaskContext) -> Sequence[Phase]:
        self._take_own(context)
        return ()

    def _take_own(self, context: TaskContext) -> None:
        for block in self._blocks:
            context.write(block, context.vault.get(OWN + block.name, self._version[block.name]))

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(context, batch)
        if self._held and self.settings.lam:
            for name, tensor in context.model.named_parameters():
                if tensor.requires_grad:
                    loss = loss + self.settings.lam / 2 * (tensor - self._near[name]).square().sum()
        return loss

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        result = super().collect(context, selected, stats)
        own = {OWN + name: values for name, values in context.read_all(self._blocks).items()}
        sent = {name: self._trained[name] for name in result.upload}
        return replace(result, upload=sent, keep={**result.keep, **own})


METHOD = Method(
    name="ditto",
    good_for="a shared model, and beside it one for each site",
    sends="the whole model; the site's own stays there",
    settings=DittoSettings,
    coordinator=DittoCoordinator,
    worker=DittoWorker,
    source="Li et al., Fair and Robust Federated Learning Through Personalization, arXiv 2012.04221, Algorithm 1",
)
