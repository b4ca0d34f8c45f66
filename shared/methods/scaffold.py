"""SCAFFOLD: each local step is corrected by the difference of the site's mean gradient from that of all sites.

Karimireddy et al. 2020, arXiv 1910.06378, Algorithm 1 with option II. A local step is w = w - eta (g - c_k + c), and
after tau of them a site keeps c_k = c_k - c + (w_t - w_k) / (tau eta). The change is -c + (w_t - w_k) / (tau eta), so
that the server can compute it from tau: nothing more is sent, and an update is no larger than FedAvg's. Under a
schedule of the learning rate, tau eta is the sum of the steps' rates, which follows from tau and the round.

The server's c moves by the changes' mean over all sites that ever took part (`shared.methods.population`), so that it
is the mean of all c_k in every round, also of absent sites. The means of controls and of models weight a site alike,
otherwise the corrections would not cancel: equally as in the paper, which minimizes the mean of the sites' losses, or
by the examples that a site had when it first took part, which minimizes the mean loss over all examples.

`strength` scales the correction. At 0 it is FedAvg, bit for bit. In between, the correction approaches the paper's as
a moving average over rounds does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from tessera.shared.methods.population import PopulationCoordinator, PopulationSettings
from tessera.shared.model.selectors import Selector
from tessera.shared.schedule import full_rate_steps, local_steps, require_summable
from tessera.shared.schema import Compatibility, Condition
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array

CONTROL = "control/"
"""The prefix of c in the server state, and of c_k in the vault."""
STEPS = "steps"


class ScaffoldSettings(PopulationSettings):
    conditions = (Condition(("population",), lambda settings: settings.strength > 0, "strength above 0"),)

    strength: float = Field(default=1.0, ge=0, le=1, description="share of the difference that is corrected")


class ScaffoldCoordinator(PopulationCoordinator[ScaffoldSettings]):
    buffered = Compatibility("the control variates of all sites are of one version")
    unequal_steps = Compatibility("its proof is for equal numbers of steps")
    regional = Compatibility("a control variate is the change of a site over its own steps")
    _keeps = "a control"
    _replaces = True

    def start(self, state: State) -> State:
        training = self.run.training
        if self.settings.strength and (training.optimizer != "sgd" or training.momentum):
            raise UnsupportedRun(
                f"scaffold needs the steps of plain SGD, and the run trains with {training.optimizer} and momentum "
                f"{training.momentum:g}: set training.optimizer to 'sgd' and training.momentum to 0"
            )
        if self.settings.strength and training.rates:
            raise UnsupportedRun(
                "scaffold computes gradients from the steps of all blocks at one learning rate: leave training.rates "
                "out, or set strength to 0"
            )
        if self.settings.strength:
            self._require_exact_updates()
        return super().start(state)

    def plan_for(self, state: State, worker: Participant) -> Plan:
        # Before the first merge there is no c; it counts as zero.
        known = any(name.startswith(CONTROL) for name in state.server_state)
        return Plan(server_state=(f"{CONTROL}*",) if known else ())

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        # The mean gradient is the step over these: fewer would scale up the worker's share of c.
        if metrics.get(STEPS) != (expected := local_steps(self.run.training, examples)):
            raise ValueError(f"{STEPS} is {metrics.get(STEPS)}; {examples} examples make it {expected}")
        if self.settings.strength:
            require_summable(self.run.training, expected)

    def check_rounds(self) -> None:
        """Accept any number, which counts under a schedule alone."""

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        updates, training = self._counted(updates), self.run.training
        if not self.settings.strength:
            return super().merge(state, updates)

        def rate_sum(steps: int) -> float:
            return full_rate_steps(training, steps, state.round + 1, self.run.rounds) * training.learning_rate

        # Once for each number of steps: under a schedule it adds up as many rates.
        rate_sums = {steps: rate_sum(int(steps)) for steps in {update.metrics[STEPS] for update in updates}}
        # A sender's share of c is replaced by its mean gradient, -d / (tau eta).
        updates, server_state = self._next_means(
            state, updates, CONTROL, lambda share, update: -share / rate_sums[update.metrics[STEPS]]
        )
        merged = super().merge(state, updates)
        return replace(merged, server_state={**merged.server_state, **server_state})


class ScaffoldWorker(WorkerHalf[ScaffoldSettings]):
    def setup(self, context: TaskContext) -> None:
        if not self.settings.strength:
            return
        self._start = context.read_all(context.plan.train.resolve(context.blocks))
        corrections: dict[str, Array] = {}
        for block in context.blocks:
            name, zero = CONTROL + block.name, np.zeros(block.shape, np.float32)
            if name in context.server_state or name in context.vault:
                difference = context.server_state.get(name, zero) - context.vault.get(name, zero)
                corrections[block.name] = (self.settings.strength * difference).astype(NUMPY_DTYPES[block.dtype])
        self._correction = context.tensors(corrections)

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
            # Option II.
            step = self._start[name].astype(np.float64) - values.astype(np.float64)
            gradient = step / stats.rate_sum
            own, server = (last.get(CONTROL + name, np.zeros(())) for last in (context.vault, context.server_state))
            control = own.astype(np.float64) - server.astype(np.float64) + gradient
            kept[CONTROL + name] = control.astype(np.float64 if values.dtype == np.float64 else np.float32)
        return replace(result, keep={**result.keep, **kept})


METHOD = Method(
    name="scaffold",
    good_for="sites whose data differ much, on fast lines",
    sends="the whole model and a correction, twice the bytes of fedavg down",
    settings=ScaffoldSettings,
    coordinator=ScaffoldCoordinator,
    worker=ScaffoldWorker,
    training={"optimizer": "sgd"},
    source="Karimireddy et al., Stochastic Controlled Averaging, arXiv 1910.06378, Algorithm 1, option II",
)
