"""MOON: a contrastive loss that draws a model's features towards the version's and away from its predecessor's.

Li et al. 2021, Model-Contrastive Federated Learning, arXiv 2103.16257, equation (3). Let z be the features of a batch
by the model in training, z_g by the version, z_p by the model that this site last submitted, and s their cosines:

    loss = f_k + mu * -log( exp(s(z, z_g)/T) / (exp(s(z, z_g)/T) + exp(s(z, z_p)/T)) )

The features are the input of the model's head: for texts, the mean over tokens other than padding; in a dual encoder,
the images'. The paper adds a projection head of two layers, which a pretrained transformer does not have. z is from
the same pass as f_k; z_g and z_p are computed without dropout. Until a site has submitted a model, the term is
omitted: with z_p = z_g its gradient is zero. With mu = 0 it is FedAvg, bit for bit.
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
from tessera.shared.model.selectors import Match, Selector
from tessera.shared.schema import Condition

if TYPE_CHECKING:
    import torch

PREVIOUS = "previous/"
"""The prefix of the last submitted model's blocks in the vault."""


class MoonSettings(MethodSettings):
    conditions = (Condition(("temperature",), lambda settings: settings.mu > 0, "mu above 0"),)

    mu: float = Field(default=1.0, ge=0, le=1000, description="weight of the contrastive term")
    temperature: float = Field(default=0.5, gt=0, le=100, description="T: divides the similarities")


class MoonCoordinator(CoordinatorHalf[MoonSettings]):
    def start(self, state: State) -> State:
        # A dual encoder's scale of the logits is a head without a module, which has no inputs.
        if not any(block.role == "head" and "." in block.tensor for block in self.run.blocks):
            raise UnsupportedRun(
                "moon contrasts the inputs of a model's head, and this model has no module as its head: begin a run "
                "with another method, or with a model that has a head"
            )
        if any(block.name == "prompts.text" for block in self.run.blocks):
            images = Match(names=("prompts.vision", "prompts.deep.vision"))
            of_images = Selector(include=(images, Match(roles=("adapter",))))
            self.run.require_trainable(of_images, "contrasts images, by the prompts of their tower")
        return state


class MoonWorker(WorkerHalf[MoonSettings]):
    loss_by_example = True
    one_example_per_row = True

    def setup(self, context: TaskContext) -> None:
        self._blocks = self.run.trainable.resolve(context.blocks)
        previous = {
            block.name: context.vault[PREVIOUS + block.name]
            for block in self._blocks
            if self.settings.mu and PREVIOUS + block.name in context.vault
        }
        self._previous = context.tensors(previous)
        self._version = context.tensors(context.read_all(self._blocks) if previous else {})

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
        previous = {PREVIOUS + name: values for name, values in context.read_all(self._blocks).items()}
        return replace(result, keep={**result.keep, **previous})


def _cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each example's two feature vectors, [examples]."""
    lengths = one.norm(dim=-1) * other.norm(dim=-1)
    cosine: torch.Tensor = (one * other).sum(dim=-1) / lengths.clamp_min(1e-8)
    return cosine


METHOD = Method(
    name="moon",
    good_for="image and text encoders whose representations drift apart between sites",
    sends="the whole model",
    settings=MoonSettings,
    coordinator=MoonCoordinator,
    worker=MoonWorker,
    source="Li et al., Model-Contrastive Federated Learning, arXiv 2103.16257, equation (3)",
)
