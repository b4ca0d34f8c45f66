"""FedAvg whose local learning rate falls to a share of itself after some rounds: a control of FedFrozen.

If freezing gains no more than this, what helps is the smaller movement of the model, not which blocks stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeInt

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
from tessera.shared.model.selectors import Selector

if TYPE_CHECKING:
    import torch

DROPPED = "dropped"
"""The stage, and the scalar of its plans."""


class DroppedRateSettings(MethodSettings):
    warmup_rounds: NonNegativeInt = Field(default=5, description="rounds at the run's learning rate")
    factor: float = Field(default=0.3, gt=0, le=1, description="share of the learning rate after these")


class DroppedRateCoordinator(CoordinatorHalf[DroppedRateSettings]):
    def plan_for(self, state: State, worker: Participant) -> Plan:
        if state.round < self.settings.warmup_rounds:
            return Plan(stage="warm-up")
        return Plan(stage=DROPPED, scalars={DROPPED: 1.0})


class DroppedRateWorker(WorkerHalf[DroppedRateSettings]):
    """The optimizers here move by the rate times something that does not depend on it. So each step at the full rate,
    shortened to the factor, is the step at the lower rate."""

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        self._before: dict[str, torch.Tensor] = {}
        return super().phases(context, selected)

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._shorten(context)
        return super().loss(context, batch)

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        self._shorten(context)
        return super().collect(context, selected, stats)

    def _shorten(self, context: TaskContext) -> None:
        """Shorten the step since the last call, and remember where the next one starts."""
        if not context.plan.scalars.get(DROPPED):
            return
        for name, parameter in context.model.named_parameters():
            if parameter.requires_grad or name in self._before:
                tensor = parameter.detach()
                if name in self._before:
                    tensor.copy_(self._before[name].lerp(tensor, self.settings.factor))
                self._before[name] = tensor.clone()


METHOD = Method(
    name="dropped-rate",
    settings=DroppedRateSettings,
    coordinator=DroppedRateCoordinator,
    worker=DroppedRateWorker,
    source="none: for benchmarks",
)
