"""SCAFFOLD: each local step is corrected by how the site's gradients differ from everybody's.

Karimireddy et al. 2020, arXiv 1910.06378, Algorithm 1 with option II. A local step is w = w - eta (g - c_k + c), and
after tau of them a site keeps c_k = c_k - c + (w_t - w_k) / (tau eta). The change is -c + (w_t - w_k) / (tau eta), so
that the server knows it once it is told tau: nothing more is sent, and an update is no larger than FedAvg's.

The server's c moves by the changes' mean over all sites that ever took part (`shared.methods.population`), so that it
is the mean of all c_k in every round, whoever is away. Both means, of controls and of models, weigh a site alike,
without which the corrections would not cancel: equally as in the paper, which leads to the minimum of the mean of the
sites' losses, or by the examples that a site had when it first took part, which leads to that of all examples' mean
loss.

`strength` scales the correction. At 0 nothing is corrected or remembered, and it is FedAvg, bit for bit. In between,
the correction approaches the paper's as a moving average over rounds does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

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
from tessera.shared.methods.population import PopulationCoordinator, PopulationSettings, SitePopulation
from tessera.shared.model.selectors import Selector
from tessera.shared.run_settings import local_steps
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, Computed, Tensor, weighted_steps

CONTROL = "control/"
"""What the names of c in the server's memory, and of c_k in the vault, begin with."""
STEPS = "steps"


class ScaffoldSettings(PopulationSettings):
    strength: float = Field(default=1.0, ge=0, le=1, description="how much of the difference is corrected for")


class ScaffoldCoordinator(PopulationCoordinator[ScaffoldSettings]):
    keeps = "a control"

    def start(self, state: State) -> State:
        training = self.run.training
        if self.settings.strength and (training.optimizer != "sgd" or training.momentum):
            raise UnsupportedRun(
                f"scaffold reads gradients off plain SGD's steps, and the run trains with {training.optimizer} and "
                f"momentum {training.momentum:g}: set training.optimizer to 'sgd' and training.momentum to 0"
            )
        return super().start(state)

    def plan_for(self, state: State, worker: Participant) -> Plan:
        # Before the first merge there is no c, which then counts as zero.
        known = any(name.startswith(CONTROL) for name in state.server_state)
        return Plan(server_state=(f"{CONTROL}*",) if known else ())

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        # A mean gradient is a step over these: fewer would multiply the worker's share of c.
        if metrics.get(STEPS) != (made := local_steps(self.run.training, examples)):
            raise ValueError(f"{STEPS} is {metrics.get(STEPS)}; {examples} examples make it {made}")

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        updates = self.counted(updates)
        if not self.settings.strength:
            return super().merge(state, updates)
        before = SitePopulation.of(state, self.settings.population)
        population = before.joined(updates)
        updates = population.weighed(updates)
        merged = super().merge(state, updates)
        kept = before.total / population.total or 1.0
        server_state = {**merged.server_state, **population.server_state()}
        for name in state.model:
            senders = [(u.examples / population.total, u) for u in updates if name in u.blocks]
            if senders or (kept != 1 and CONTROL + name in server_state):
                server_state[CONTROL + name] = self._control(state, name, kept, senders)
        return replace(merged, server_state=server_state)

    def _control(self, state: State, name: str, kept: float, senders: Sequence[tuple[float, Update]]) -> Tensor:
        """Return the block's next c: what is kept of it is spread over those who are new too, who begin with none,
        and each sender's share gives way to its mean gradient, -d / (tau eta)."""
        base, last = state.model[name], state.server_state.get(CONTROL + name)
        rate = self.run.training.learning_rate
        gradient = weighted_steps(base, [(-s / (u.metrics[STEPS] * rate), u.blocks[name]) for s, u in senders])
        kept -= fsum(share for share, _ in senders)

        def control(parts: Sequence[Array]) -> Array:
            moved: Array = parts[0] + (kept * parts[1].astype(np.float64) if len(parts) > 1 else 0.0)
            return moved

        sources = (gradient,) if last is None else (gradient, last)
        return Computed(base.shape, "F64" if base.dtype == "F64" else "F32", sources, control)


class ScaffoldWorker(WorkerHalf[ScaffoldSettings]):
    def setup(self, context: TaskContext) -> None:
        if not self.settings.strength:
            return
        self._start = {block.name: context.read(block) for block in context.plan.train.resolve(context.blocks)}
        differences: dict[str, Array] = {}
        for block in context.blocks:
            server, own = context.server_state.get(CONTROL + block.name), context.vault.get(CONTROL + block.name)
            if server is not None or own is not None:
                zero = np.zeros(block.shape, np.float32)
                difference = (zero if server is None else server) - (zero if own is None else own)
                differences[block.name] = (self.settings.strength * difference).astype(NUMPY_DTYPES[block.dtype])
        self._correction = context.tensors(differences)

    def after_backward(self, context: TaskContext) -> None:
        if self.settings.strength:
            for name, parameter in context.model.named_parameters():
                if parameter.grad is not None and name in self._correction:
                    parameter.grad.add_(self._correction[name])

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        result = replace(super().collect(context, selected, stats), metrics={STEPS: float(stats.steps)})
        if not self.settings.strength:
            return result
        kept = {name: values for name, values in context.vault.items() if name.startswith(CONTROL)}
        for name, values in result.upload.items():
            kept[CONTROL + name] = self._control(context, name, values, stats.steps)
        return replace(result, keep={**result.keep, **kept})

    def _control(self, context: TaskContext, name: str, values: Array, steps: int) -> Array:
        """Return the block's next c_k, option II."""
        step = self._start[name].astype(np.float64) - values.astype(np.float64)
        gradient = step / (steps * self.run.training.learning_rate)
        own, server = (kept.get(CONTROL + name, np.zeros(())) for kept in (context.vault, context.server_state))
        control: Array = own.astype(np.float64) - server.astype(np.float64) + gradient
        return control.astype(np.float64 if values.dtype == np.float64 else np.float32)


METHOD = Method(
    name="scaffold",
    settings=ScaffoldSettings,
    coordinator=ScaffoldCoordinator,
    worker=ScaffoldWorker,
    source="Karimireddy et al., Stochastic Controlled Averaging, arXiv 1910.06378, Algorithm 1, option II",
)
