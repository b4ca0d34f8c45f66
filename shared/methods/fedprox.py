"""FedProx: a quadratic term regularizes each worker's model towards the version that it started from.

Li et al. 2020, arXiv 1812.06127, equation (2): the local objective is F_k(w) + mu/2 |w - w_t|^2. With mu = 0 it is
FedAvg, bit for bit, because the term is then left out rather than added as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    State,
    TaskContext,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.run_settings import Training

if TYPE_CHECKING:
    import torch


class FedProxSettings(MethodSettings):
    mu: float = Field(default=0.01, ge=0, description="weight of the quadratic term")


class FedProxCoordinator(CoordinatorHalf[FedProxSettings]):
    def start(self, state: State) -> State:
        training, mu = self.run.training, self.settings.mu
        if self.run.fitted and training.optimizer == "sgd" and training.learning_rate * mu > 1:
            raise UnsupportedRun(
                f"mu is {mu:g} and training.learning_rate {training.learning_rate:g}: their product is above 1, so "
                "that a step may undo all earlier ones, and fitted work cannot count them. Lower either, or "
                'set cohort.work to "fixed"'
            )
        return super().start(state)

    @property
    def _mu(self) -> float:
        return self.settings.mu

    def warnings(self, state: State) -> Sequence[str]:
        return () if state.round else overshoots("mu", self.settings.mu, self.run.training)


def overshoots(name: str, weight: float, training: Training) -> Sequence[str]:
    """Return a warning if steps of SGD on the term weight/2 |w - w_t|^2 lead away from its minimum.

    A step multiplies the distance by 1 - rate * weight. With momentum the limit is higher: Polyak 1964.
    """
    limit = 2 * (1 + training.momentum)
    if training.optimizer != "sgd" or training.learning_rate * weight <= limit:
        return ()
    said = (
        f"{name} is {weight:g} and training.learning_rate {training.learning_rate:g}: their product is above "
        f"{limit:g}, so that each step leads away from the version and training diverges. Lower {name} to at most "
        f"{limit / training.learning_rate:g}, or lower the rate"
    )
    return (said,)


class FedProxWorker(WorkerHalf[FedProxSettings]):
    def setup(self, context: TaskContext) -> None:
        trainable = {block.tensor for block in self.run.trainable.resolve(context.blocks)}
        parameters = context.model.named_parameters()
        self._start = {name: tensor.detach().clone() for name, tensor in parameters if name in trainable}

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(context, batch)
        if self.settings.mu:
            for name, tensor in context.model.named_parameters():
                # The distance of a frozen tensor is zero.
                if tensor.requires_grad:
                    loss = loss + self.settings.mu / 2 * (tensor - self._start[name]).square().sum()
        return loss


METHOD = Method(
    name="fedprox",
    good_for="sites whose data differ much, or that train for different numbers of steps",
    sends="the whole model",
    settings=FedProxSettings,
    coordinator=FedProxCoordinator,
    worker=FedProxWorker,
    source="Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127, equation (2)",
)
