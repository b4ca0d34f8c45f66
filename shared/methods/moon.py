"""MOON: what a site's model sees in its data is held near to what the global one sees, and away from its own last.

Li et al. 2021, Model-Contrastive Federated Learning, arXiv 2103.16257, equation (3). Let z be the features of a batch
by the model in training, z_g by the version, z_p by the model that this site last handed in, and s their cosines:

    loss = f_k + mu * -log( exp(s(z, z_g)/T) / (exp(s(z, z_g)/T) + exp(s(z, z_p)/T)) )

The features are what the model's own head is handed, of texts the mean over the tokens that are no padding. The paper
puts a projection head of two layers before it, which a pretrained transformer does not have. z is of the same pass as
f_k; z_g and z_p are of models that do not train, hence without dropout. Until a site has handed in a model, the term
is left out: with z_p = z_g its gradient is zero. With mu = 0 it is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.model.selectors import Selector

if TYPE_CHECKING:
    import torch

PREVIOUS = "previous/"
"""What the names of the last model's blocks in the vault begin with."""


class MoonSettings(MethodSettings):
    mu: float = Field(default=1.0, ge=0, le=1000, description="how much the contrast counts")
    temperature: float = Field(default=0.5, gt=0, le=100, description="T")


class MoonCoordinator(CoordinatorHalf[MoonSettings]):
    def start(self, state: State) -> State:
        if not any(block.role == "head" for block in self.run.blocks):
            raise UnsupportedRun(
                "moon contrasts what a model's head is handed, and this model has no head of its own"
            )
        return state


class MoonWorker(WorkerHalf[MoonSettings]):
    def setup(self, context: TaskContext) -> None:
        previous = {
            block.name: context.vault[PREVIOUS + block.name]
            for block in context.blocks
            if self.settings.mu and PREVIOUS + block.name in context.vault
        }
        self._previous = context.tensors(previous)
        self._version = context.tensors(
            {block.name: context.read(block) for block in context.blocks} if previous else {}
        )

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not self._previous:
            return super().loss(context, batch)
        output, features = context.forward_with_features(batch)  # features: [examples, width]
        near = _cosine(features, context.features(batch, self._version))
        far = _cosine(features, context.features(batch, self._previous))
        # -log(exp(near/T) / (exp(near/T) + exp(far/T))), which is softplus of the difference.
        difference = (far - near) / self.settings.temperature  # [examples]
        return output.loss + self.settings.mu * difference.logaddexp(difference.new_zeros(())).mean()

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        result = super().collect(context, selected, stats)
        if not self.settings.mu:
            return result
        previous = {PREVIOUS + block.name: context.read(block) for block in context.blocks}
        return replace(result, keep={**result.keep, **previous})


def _cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each example's two feature vectors, [examples]."""
    lengths = one.norm(dim=-1) * other.norm(dim=-1)
    cosine: torch.Tensor = (one * other).sum(dim=-1) / lengths.clamp_min(1e-8)
    return cosine


METHOD = Method(
    name="moon",
    settings=MoonSettings,
    coordinator=MoonCoordinator,
    worker=MoonWorker,
    source="Li et al., Model-Contrastive Federated Learning, arXiv 2103.16257, equation (3)",
)
