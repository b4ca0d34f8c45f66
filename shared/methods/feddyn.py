"""FedDyn: each site's objective is bent until the sites' optima agree with everybody's.

Acar et al. 2021, arXiv 2111.04263, with the signs and scales of its authors' code. A site descends on
f_k(w) + alpha_k / 2 |w - w_t + h_k|^2 and then adds what it moved by to its h_k. The server adds the mean of all h_k
to the mean of what came back:

    h_k = h_k + (w_k - w_t),    w_{t+1} = mean_S w_k + mean_all h_k

The mean of all h_k moves by the sum of what this round's sites moved by, over the population; so it is kept at the
server, and an update is no larger than FedAvg's. Means are unweighted, as in the code, which puts a site's size into
its alpha_k = alpha / (its examples / the mean of examples), here over the round's cohort. With `weigh = "examples"`
means are weighted instead and alpha_k = alpha, for rounds in which all take part: the mean of all h_k needs the same
weights in every round. Together with alpha = 0, where nothing is bent or remembered, that is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from shared.blocks import NUMPY_DTYPES, Selector
from shared.methods.contract import (
    CoordinatorHalf,
    Harvest,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    Tally,
    Unsuited,
    Update,
    Work,
    WorkerHalf,
)
from shared.tensors import Array, Computed, Derived, Tensor, weighted_steps

DRIFT = "drift/"
"""What the names of the mean of h_k in the server's memory, and of h_k in the vault, begin with."""
ALPHA = "alpha"


class FedDynSettings(MethodSettings):
    alpha: float = Field(default=0.01, ge=0, le=1000, description="how strongly sites are held to one another")
    weigh: Literal["equal", "examples"] = Field(default="equal", description="what a site counts in the means")
    population: PositiveInt | None = Field(
        default=None, description="workers that take part by turns; as many as each round has if left out"
    )

    @model_validator(mode="after")
    def _same_weight_in_every_round(self) -> Self:
        if self.population is not None and self.weigh == "examples":
            raise ValueError("a population that takes part by turns needs weigh = 'equal'")
        return self


class FedDynCoordinator(CoordinatorHalf[FedDynSettings]):
    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        if self.settings.weigh == "examples":
            return super().plan(state, cohort, rng)
        mean = fmean(max(1, worker.examples) for worker in cohort)
        relative = {worker.name: max(1, worker.examples) / mean for worker in cohort}
        return {name: Plan(numbers={ALPHA: self.settings.alpha / size}) for name, size in relative.items()}

    def guard(self) -> None:
        raise Unsuited(
            "feddyn's drift is a sum of steps, which no robust rule guards: leave out robust, or choose "
            "another method"
        )

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        if self.settings.weigh == "equal":
            updates = [replace(update, examples=1) for update in updates]
        merged = super().merge(state, updates)
        if not self.settings.alpha:
            return merged
        present = len(updates) / max(len(updates), self.settings.population or 1)
        whole = sum(update.examples for update in updates)
        model, memory = dict(merged.model), dict(merged.memory)
        for name, base in state.model.items():
            senders = [(present * u.examples / whole, u.blocks[name]) for u in updates if name in u.blocks]
            if senders:
                drift = _drifted(base, state.memory.get(DRIFT + name), senders)
                model[name] = _added(base, merged.model[name], drift)
                memory[DRIFT + name] = drift
        return replace(merged, model=model, memory=memory)


def _drifted(base: Tensor, last: Tensor | None, senders: Sequence[tuple[float, Tensor]]) -> Tensor:
    """A block's next mean of all h_k."""

    def drift(parts: Sequence[Array]) -> Array:
        total: Array = np.sum([_wide(part) for part in parts], axis=0)
        return total

    moved = weighted_steps(base, senders)
    sources = (moved,) if last is None else (moved, last)
    return Computed(base.shape, "F64" if base.dtype == "F64" else "F32", sources, drift)


def _added(base: Tensor, mean: Tensor, drift: Tensor) -> Tensor:
    def add(parts: Sequence[Array]) -> Array:
        total: Array = _wide(parts[0]) + _wide(parts[1])
        return total

    exact = replace(mean, dtype="F64") if isinstance(mean, Derived) else mean
    return Computed(base.shape, base.dtype, (exact, drift), add)


class FedDynWorker(WorkerHalf[FedDynSettings]):
    def prepare(self, work: Work) -> None:
        self._alpha = work.plan.numbers.get(ALPHA, self.settings.alpha)
        if not self._alpha:
            return
        trained = work.plan.train.resolve(work.blocks)
        self._start = {block.name: work.read(block) for block in trained}
        # Where the bent part alone would have this site: w_t - h_k.
        centre = {name: _wide(start) - self._drift(work, name) for name, start in self._start.items()}
        kinds = {block.name: NUMPY_DTYPES[block.dtype] for block in trained}
        self._centre = work.tensors({name: values.astype(kinds[name]) for name, values in centre.items()})

    def _drift(self, work: Work, name: str) -> Array:
        """h_k of a block, float64; zero for a site that is new to it."""
        return _wide(work.vault.get(DRIFT + name, np.zeros_like(self._start[name])))

    def after_backward(self, work: Work) -> None:
        if self._alpha:
            for name, parameter in work.model.named_parameters():
                if parameter.grad is not None and name in self._centre:
                    parameter.grad.add_(parameter.detach() - self._centre[name], alpha=self._alpha)

    def harvest(self, work: Work, selected: Selector, tally: Tally) -> Harvest:
        harvest = super().harvest(work, selected, tally)
        if not self._alpha:
            return harvest
        kept = {name: values for name, values in work.vault.items() if name.startswith(DRIFT)}
        for name, values in harvest.upload.items():
            drift = self._drift(work, name) + _wide(values) - _wide(self._start[name])
            kept[DRIFT + name] = drift.astype(np.float64 if values.dtype == np.float64 else np.float32)
        return replace(harvest, keep={**harvest.keep, **kept})


def _wide(values: Array) -> Array:
    return values.astype(np.float64)


METHOD = Method(
    name="feddyn",
    settings=FedDynSettings,
    coordinator=FedDynCoordinator,
    worker=FedDynWorker,
    source="Acar et al., Federated Learning Based on Dynamic Regularization, arXiv 2111.04263, and its authors' code",
)
