"""FedDyn: dynamic regularization of each site's objective, so that the sites' optima agree with the global one.

Acar et al. 2021, arXiv 2111.04263, with the signs and scales of its authors' code, written with gradients: their
h_k is our g_k / alpha_k. A site descends on f_k(w) + alpha_k / 2 |w - w_t|^2 + <g_k, w> and then adds alpha_k times
its step to g_k, which thus becomes minus its gradient at the end point. With p_k a site's share of the examples of
all sites that ever took part (`shared.methods.population`), the server adds the remaining gradient to the mean of the
received models:

    g_k = g_k + alpha_k (w_k - w_t),    w_{t+1} = mean_S w_k + sum_all p_k g_k / alpha

The server keeps the sum and adds this round's changes, so an update is no larger than FedAvg's. The mean of the
received models is unweighted, as in the code, which puts a site's size into its alpha_k = alpha / (its examples /
their mean over all sites): then p_k alpha_k / alpha is one over the number of sites. With `weigh = "examples"` that
mean is weighted instead, and alpha_k = alpha. Either way the limit is the minimum of the mean loss over all examples.
alpha_k may change between rounds, as it does when a site joins: g_k and the sum are gradients, independent of it.

A site's first alpha_k follows from the examples that it declared, so it joins with no more than these: a site that
reported more than it declared would scale up its step in the sum.

With alpha = 0 and weights by examples it is FedAvg, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median

import numpy as np
from pydantic import Field

from tessera.shared.methods.base import (
    LocalResult,
    Method,
    Participant,
    Plan,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    Update,
    WorkerHalf,
)
from tessera.shared.methods.fedprox import overshoots
from tessera.shared.methods.population import PopulationCoordinator, PopulationSettings, SitePopulation, scaled_sum
from tessera.shared.model.selectors import Selector
from tessera.shared.schema import Compatibility, Condition
from tessera.shared.tensors.lazy import Array, ComputedTensor, DerivedTensor
from tessera.shared.tensors.statistics import is_statistic

GRADIENT = "gradient/"
"""The prefix of the mean of g_k in the server state, and of g_k in the vault."""
ALPHA = "alpha"
SIZE = "size"
"""The site's examples in a plan's scalars, from which its alpha_k follows."""


class FedDynSettings(PopulationSettings):
    conditions = (Condition(("population",), lambda settings: settings.alpha > 0, "alpha above 0"),)

    alpha: float = Field(default=0.01, ge=0, le=1000, description="strength of the regularization")

    def alpha_of(self, plan: Plan) -> float:
        """Return the alpha_k of a site with this plan."""
        return plan.scalars.get(ALPHA, self.alpha)


class FedDynCoordinator(PopulationCoordinator[FedDynSettings]):
    buffered = Compatibility("the sum of all sites' drifts takes each update at its own version")
    unequal_steps = Compatibility("its proof is for equal numbers of steps")
    regional = Compatibility("the sum of drifts takes the step of each site")
    _keeps = "a gradient"

    def start(self, state: State) -> State:
        if self.settings.alpha:
            self._require_exact_updates()
            if not self.run.server_optimizer.neutral:
                # The sum of all g_k / alpha is an integral already, which moments would integrate again.
                raise UnsupportedRun(
                    "feddyn's server step is exact, and makes a server_optimizer diverge: leave the latter out, or "
                    "choose another method, such as scaffold"
                )
        return super().start(state)

    def warnings(self, state: State) -> Sequence[str]:
        # A small site has a larger alpha_k: only the stored population tells, and a merge has not stored it yet.
        return () if state.round else overshoots("alpha", self.settings.alpha, self.run.training)

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        if self.settings.weigh == "examples":
            return super().plan(state, cohort, rng)
        population = SitePopulation.of(state)
        sizes = {worker.name: population.weight(worker.site) or max(1, worker.examples) for worker in cohort}
        # The median, so that no single new site determines the alpha of all.
        usual = population.mean or median(sizes.values())
        alpha = self.settings.alpha
        return {name: Plan(scalars={ALPHA: alpha * usual / size, SIZE: float(size)}) for name, size in sizes.items()}

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        if not self.settings.alpha:
            return super().merge(state, self._counted(updates))
        planned = [
            replace(each, examples=min(each.examples, int(each.plan.scalars.get(SIZE, each.examples))))
            for each in updates
        ]
        updates, server_state = self._next_means(
            state, planned, GRADIENT, lambda share, update: share * self.settings.alpha_of(update.plan)
        )
        merged = super().merge(state, self._counted(updates))
        model = dict(merged.model)
        for name in {name for update in updates for name in update.blocks if not is_statistic(name)}:
            mean, base = model[name], state.model[name]
            exact = replace(mean, dtype="F64") if isinstance(mean, DerivedTensor) else mean
            add = partial(scaled_sum, 1 / self.settings.alpha)
            model[name] = ComputedTensor(base.shape, base.dtype, (exact, server_state[GRADIENT + name]), add)
        return replace(merged, model=model, server_state={**merged.server_state, **server_state})


class FedDynWorker(WorkerHalf[FedDynSettings]):
    def setup(self, context: TaskContext) -> None:
        self._alpha = self.settings.alpha_of(context.plan)
        if not self._alpha:
            return
        self._start = context.read_all(context.plan.train.resolve(context.blocks))
        # The minimum of the regularization alone: w_t - g_k / alpha_k.
        centre = {
            name: (_wide(start) - self._gradient(context, name) / self._alpha).astype(start.dtype)
            for name, start in self._start.items()
        }
        self._centre = context.tensors(centre)

    def _gradient(self, context: TaskContext, name: str) -> Array:
        """Return g_k of a block, float64; zero for a site that has not trained the block yet."""
        return _wide(context.vault.get(GRADIENT + name, np.zeros_like(self._start[name])))

    def after_backward(self, context: TaskContext) -> None:
        if self._alpha:
            for name, parameter in context.model.named_parameters():
                if parameter.grad is not None and name in self._centre:
                    parameter.grad.add_(parameter.detach() - self._centre[name], alpha=self._alpha)

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        result = super().collect(context, selected, stats)
        if not self._alpha:
            return result
        kept = {name: values for name, values in context.vault.items() if name.startswith(GRADIENT)}
        for name, values in result.upload.items():
            gradient = self._gradient(context, name) + self._alpha * (_wide(values) - _wide(self._start[name]))
            kept[GRADIENT + name] = gradient.astype(np.float64 if values.dtype == np.float64 else np.float32)
        return replace(result, keep={**result.keep, **kept})


def _wide(values: Array) -> Array:
    return values.astype(np.float64)


METHOD = Method(
    name="feddyn",
    good_for="sites whose data differ much, at the bytes of fedavg",
    sends="the whole model",
    settings=FedDynSettings,
    coordinator=FedDynCoordinator,
    worker=FedDynWorker,
    source="Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, and its authors' code",
)
