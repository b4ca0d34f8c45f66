"""FedNova: each update is divided by its local work, so that a worker with more steps does not count more.

Wang et al. 2020, Tackling the Objective Inconsistency Problem, arXiv 2007.07481, Section 4. With p_k the share of the
examples, d_k the update and a_k the l1 norm of its accumulation vector:

    w = w + tau_eff sum_k p_k d_k / a_k,    tau_eff = sum_k p_k a_k

Plain SGD has a_k = steps. With momentum rho, a_k is the sum over the steps of the counter c = rho c + 1. Under a
schedule each step counts with its share of the learning rate: the vector covers variable rates. Rates by role scale a
block's d_k and a_k alike at all sites, so that they cancel out. AdamW has no such
vector: the steps replace it, without the paper's proof. If all a_k are equal it is FedAvg, bit for bit. Blocks that
only some workers sent are averaged by the run's `normalization`, with the same scaling. No step is scaled to more
than the run's `max_update_norm`. A site whose weight is capped by the run's `max_examples` counts in tau_eff with the
a_k of that many examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum
from statistics import median

from tessera.shared.methods.base import (
    UPDATE_NORM,
    CoordinatorHalf,
    Guard,
    LocalResult,
    Method,
    MethodSettings,
    Participant,
    Plan,
    RunInfo,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    Update,
    WorkerHalf,
)
from tessera.shared.model.selectors import Selector
from tessera.shared.run_settings import Training
from tessera.shared.schedule import local_steps, rate_factors, require_summable
from tessera.shared.schema import Compatibility
from tessera.shared.tensors.lazy import StretchedStep
from tessera.shared.tensors.statistics import is_statistic

EFFECTIVE_STEPS = "effective_steps"
ROUND = "round"
"""The round in a plan's scalars, on which the rates of a schedule depend."""
ROUNDING = 1e-9
"""The relative tolerance of a reported sum, for a worker that adds up step by step and rounds at each."""


def effective_steps(steps: int, training: Training, round_number: int = 1, rounds: int = 1) -> float:
    """Return a_k: the factor of a constant gradient in the update, in units of the learning rate.

    Takes one iteration per binary digit of `steps`. The closed form, (n - rho (1 - rho^n) / (1 - rho)) / (1 - rho),
    loses precision where rho is close to 1; doubling adds only positive numbers. Under a schedule, which depends on
    the round, it takes one iteration per step, and raises ValueError for too many of them.
    """
    momentum = training.momentum if training.optimizer == "sgd" else 0.0
    if training.scheduled:
        require_summable(training, steps)
        moved, velocity = 0.0, 0.0
        for factor in rate_factors(training, steps, round_number, rounds):
            velocity = momentum * velocity + 1
            moved += factor * velocity
        return moved
    # After n steps: the sum of the counters, the counter, and momentum ** n.
    total, counter, power = 0.0, 0.0, 1.0
    for digit in f"{steps:b}":
        # From n steps to 2 n; the later half starts with `counter` in place of 0.
        total, counter, power = 2 * total + momentum * counter**2, counter * (1 + power), power**2
        if digit == "1":
            counter, power = momentum * counter + 1, momentum * power
            total += counter
    return total


def _planned_steps(steps: int, plan: Plan, run: RunInfo) -> float:
    """Return a_k of a number of steps in the round of a plan."""
    return effective_steps(steps, run.training, int(plan.scalars.get(ROUND, 1)), run.rounds)


class FedNovaCoordinator(CoordinatorHalf[MethodSettings]):
    # A step is scaled from where it started.
    buffered = Compatibility()

    def start(self, state: State) -> State:
        if self.run.training.keep_moments and self.run.training.optimizer == "sgd":
            raise UnsupportedRun(
                "fednova counts a site's momentum from zero in each round: leave training.keep_moments out, or train "
                "with adamw"
            )
        return super().start(state)

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan(scalars={ROUND: state.round + 1} if self.run.training.scheduled else {})

    def check_rounds(self) -> None:
        """Accept any number, which counts under a schedule alone."""

    def _expected_steps(self, plan: Plan, examples: int) -> float:
        return _planned_steps(local_steps(self.run.training, examples), plan, self.run)

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        # A claim of more work would scale up the steps of all workers, one of less the worker's own.
        expected = self._expected_steps(plan, examples)
        if not abs(metrics.get(EFFECTIVE_STEPS, 0.0) - expected) <= ROUNDING * expected:
            raise ValueError(
                f"{EFFECTIVE_STEPS} is {metrics.get(EFFECTIVE_STEPS)}; {examples} examples make it {expected:g}"
            )

    def step_scale(self, metrics: Mapping[str, float]) -> float:
        # Without tau_eff, which is common to a round and depends on its cohort, so that rounds can be compared.
        return 1 / metrics[EFFECTIVE_STEPS]

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        return super().merge(state, self.scaled(state, updates))

    def scaled(self, state: State, updates: Sequence[Update]) -> Sequence[Update]:
        steps = [update.metrics[EFFECTIVE_STEPS] for update in updates]
        if len(set(steps)) <= 1:
            return updates
        if self.run.robust.neutral:
            # At most the a_k of the examples that the update may weigh: tau_eff scales the steps of all sites, so a
            # site that claims unlimited work must not raise it.
            most = [self._expected_steps(update.plan, update.examples) for update in updates]
            counted = [min(own, capped) for own, capped in zip(steps, most, strict=True)]
            weights = [update.examples for update in updates]
            mean = fsum(n * own for n, own in zip(weights, counted, strict=True)) / fsum(weights)
        else:
            mean = median(steps)
        return [self._scaled(state, update, mean / own) for own, update in zip(steps, updates, strict=True)]

    def _scaled(self, state: State, update: Update, factor: float) -> Update:
        # The sent update met the largest norm, but an update of few steps is scaled up by a large factor.
        limit, norm = self.run.max_update_norm, update.metrics.get(UPDATE_NORM)
        if limit is not None and norm:
            factor = min(factor, limit / norm)
        blocks = {
            name: tensor if is_statistic(name) else StretchedStep(state.model[name], tensor, factor)
            for name, tensor in update.blocks.items()
        }
        return replace(update, blocks=blocks)

    def check_merge(self, guard: Guard) -> None:
        """Accept every robust rule: tau_eff, which depends on reported metrics, is then their median."""
        if guard != "robust":
            super().check_merge(guard)


class FedNovaWorker(WorkerHalf[MethodSettings]):
    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        metrics = {EFFECTIVE_STEPS: _planned_steps(stats.steps, context.plan, self.run)}
        return replace(super().collect(context, selected, stats), metrics=metrics)


METHOD = Method(
    name="fednova",
    good_for="sites with very different numbers of examples",
    sends="the whole model, and the number of local steps",
    coordinator=FedNovaCoordinator,
    worker=FedNovaWorker,
    source="Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481, Section 4",
)
