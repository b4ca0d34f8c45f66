"""FedDyn: each site's objective is bent until the sites' optima agree with everybody's.

Acar et al. 2021, arXiv 2111.04263, with the signs and scales of its authors' code, written with gradients: their
h_k is our g_k / alpha_k. A site descends on f_k(w) + alpha_k / 2 |w - w_t|^2 + <g_k, w> and then adds alpha_k times
what it moved by to its g_k, which so becomes minus its gradient where it ended. With p_k a site's share of the
examples of all sites that ever took part (`shared.methods.population`), the server adds what the gradients lack to
zero to the mean of what came back:

    g_k = g_k + alpha_k (w_k - w_t),    w_{t+1} = mean_S w_k + sum_all p_k g_k / alpha

The sum moves by what this round's sites added, so it is kept at the server, and an update is no larger than FedAvg's.
The mean of what came back is unweighted, as in the code, which puts a site's size into its alpha_k = alpha / (its
examples / their mean over all sites): then p_k alpha_k / alpha is one over the number of sites. With
`weigh = "examples"` that mean is weighted instead, and alpha_k = alpha. Either way the limit is the minimum of the
mean loss over all examples. alpha_k may change from round to round, as it does when a site joins, because g_k and the
sum are gradients and do not depend on it.

At alpha = 0 nothing is bent or remembered: with weights by examples that is FedAvg, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    Update,
    WorkerHalf,
)
from tessera.shared.methods.population import PopulationCoordinator, PopulationSettings, SitePopulation
from tessera.shared.model.selectors import Selector
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, Computed, Derived, Tensor, weighted_steps

GRADIENT = "gradient/"
"""What the names of the mean of g_k in the server's memory, and of g_k in the vault, begin with."""
ALPHA = "alpha"


class FedDynSettings(PopulationSettings):
    alpha: float = Field(default=0.01, ge=0, le=1000, description="how strongly sites are held to one another")


class FedDynCoordinator(PopulationCoordinator[FedDynSettings]):
    keeps = "a gradient"

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        if self.settings.weigh == "examples":
            return super().plan(state, cohort, rng)
        population = SitePopulation.of(state)
        sizes = {worker.name: population.weight(worker.site) or max(1, worker.examples) for worker in cohort}
        # Of sites that were never heard of, no single one decides how strongly all are held.
        usual = population.mean or median(sizes.values())
        return {name: Plan(scalars={ALPHA: self.settings.alpha * usual / size}) for name, size in sizes.items()}

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        if not self.settings.alpha:
            return super().merge(state, self.counted(updates))
        before = SitePopulation.of(state, self.settings.population)
        population = before.joined(updates)
        updates = population.weighed(updates)
        merged = super().merge(state, self.counted(updates))
        kept = before.total / population.total or 1.0
        model, server_state = dict(merged.model), dict(merged.server_state)
        for name, base in state.model.items():
            senders = [
                (u.examples / population.total * self._alpha(u), u.blocks[name]) for u in updates if name in u.blocks
            ]
            last = state.server_state.get(GRADIENT + name)
            if senders or (last is not None and kept != 1):
                server_state[GRADIENT + name] = gradient = _moved(base, last, kept, senders)
                if senders:
                    model[name] = _added(base, merged.model[name], gradient, 1 / self.settings.alpha)
        return replace(merged, model=model, server_state={**server_state, **population.server_state()})

    def _alpha(self, update: Update) -> float:
        """Return the alpha_k that the update was made with."""
        return update.plan.scalars.get(ALPHA, self.settings.alpha)


def _moved(base: Tensor, last: Tensor | None, kept: float, senders: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return a block's next mean of all g_k; what it was is spread over those who are new, who begin with none."""

    def mean(parts: Sequence[Array]) -> Array:
        total: Array = _wide(parts[0]) + (kept * _wide(parts[1]) if len(parts) > 1 else 0.0)
        return total

    moved = weighted_steps(base, senders)
    sources = (moved,) if last is None else (moved, last)
    return Computed(base.shape, "F64" if base.dtype == "F64" else "F32", sources, mean)


def _added(base: Tensor, mean: Tensor, gradient: Tensor, factor: float) -> Tensor:
    def add(parts: Sequence[Array]) -> Array:
        total: Array = _wide(parts[0]) + factor * _wide(parts[1])
        return total

    exact = replace(mean, dtype="F64") if isinstance(mean, Derived) else mean
    return Computed(base.shape, base.dtype, (exact, gradient), add)


class FedDynWorker(WorkerHalf[FedDynSettings]):
    def setup(self, context: TaskContext) -> None:
        self._alpha = context.plan.scalars.get(ALPHA, self.settings.alpha)
        if not self._alpha:
            return
        trained = context.plan.train.resolve(context.blocks)
        self._start = {block.name: context.read(block) for block in trained}
        # Where the bent part alone would have this site: w_t - g_k / alpha_k.
        centre = {
            name: _wide(start) - self._gradient(context, name) / self._alpha for name, start in self._start.items()
        }
        kinds = {block.name: NUMPY_DTYPES[block.dtype] for block in trained}
        self._centre = context.tensors({name: values.astype(kinds[name]) for name, values in centre.items()})

    def _gradient(self, context: TaskContext, name: str) -> Array:
        """g_k of a block, float64; zero for a site that is new to it."""
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
            moved = _wide(values) - _wide(self._start[name])
            gradient = self._gradient(context, name) + self._alpha * moved
            kept[GRADIENT + name] = gradient.astype(np.float64 if values.dtype == np.float64 else np.float32)
        return replace(result, keep={**result.keep, **kept})


def _wide(values: Array) -> Array:
    return values.astype(np.float64)


METHOD = Method(
    name="feddyn",
    settings=FedDynSettings,
    coordinator=FedDynCoordinator,
    worker=FedDynWorker,
    source="Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, and its authors' code",
)
