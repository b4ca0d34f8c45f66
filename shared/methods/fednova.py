"""FedNova: what a worker moved is divided by how much it worked, so that who takes more steps does not count twice.

Wang et al. 2020, Tackling the Objective Inconsistency Problem, arXiv 2007.07481, Section 4. With p_k the share of the
examples, d_k the update and a_k the l1 norm of its accumulation vector:

    w = w + tau_eff sum_k p_k d_k / a_k,    tau_eff = sum_k p_k a_k

Plain SGD has a_k = steps. With momentum rho the counter c = rho c + 1 is added up over the steps. AdamW has no such
vector: steps stand for it, which keeps the idea and loses the proof. If all a_k are equal it is FedAvg, bit for bit.
Blocks that only some workers sent are averaged as the run's `normalization` says, each worker's step scaled all the
same. No step is stretched to more than the run's `max_update_norm`. A site whose weight is capped by the run's
`max_examples` counts in tau_eff with the a_k of that many examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum
from statistics import median

from tessera.shared.methods.base import (
    UPDATE_NORM,
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    Plan,
    State,
    TaskContext,
    TrainingStats,
    Update,
    WorkerHalf,
)
from tessera.shared.model.selectors import Selector
from tessera.shared.run_settings import Training, local_steps
from tessera.shared.tensors.lazy import Stretched

EFFECTIVE_STEPS = "effective_steps"
ROUNDING = 1e-9
"""By how much a worker's sum may differ from ours: one that adds up step by step rounds at each."""


def effective_steps(steps: int, training: Training) -> float:
    """Return a_k: by how much a constant gradient would have been multiplied, in units of the learning rate.

    Takes one turn for each binary digit of `steps`. The closed form, (n - rho (1 - rho^n) / (1 - rho)) / (1 - rho),
    loses its digits where rho is close to 1; doubling only adds positive numbers.
    """
    momentum = training.momentum if training.optimizer == "sgd" else 0.0
    # After n steps: the sum of the counters, the counter, and momentum ** n.
    total, counter, power = 0.0, 0.0, 1.0
    for digit in f"{steps:b}":
        # From n steps to 2 n, of which the later ones start with a counter of `counter` in place of 0.
        total, counter, power = 2 * total + momentum * counter**2, counter * (1 + power), power**2
        if digit == "1":
            counter, power = momentum * counter + 1, momentum * power
            total += counter
    return total


class FedNovaCoordinator(CoordinatorHalf[MethodSettings]):
    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        # More work than there was would multiply everybody's step, and less the worker's own.
        made = effective_steps(local_steps(self.run.training, examples), self.run.training)
        if not abs(metrics.get(EFFECTIVE_STEPS, 0.0) - made) <= ROUNDING * made:
            raise ValueError(
                f"{EFFECTIVE_STEPS} is {metrics.get(EFFECTIVE_STEPS)}; {examples} examples make it {made:g}"
            )

    def step_scale(self, metrics: Mapping[str, float]) -> float:
        # tau_eff is common to a round and follows from who is in it: without it, rounds can be compared.
        return 1 / metrics[EFFECTIVE_STEPS]

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        steps = {update.worker: update.metrics[EFFECTIVE_STEPS] for update in updates}
        if len(set(steps.values())) <= 1:
            return super().merge(state, updates)
        if self.run.robust.neutral:
            weights = [update.examples for update in updates]
            mean = fsum(update.examples * self._counted(update) for update in updates) / fsum(weights)
        else:
            mean = median(steps.values())
        return super().merge(
            state, [self._stretched(state, update, mean / steps[update.worker]) for update in updates]
        )

    def _counted(self, update: Update) -> float:
        """Return the a_k of the update in tau_eff: at most what the examples make that it may weigh.

        Everybody's step is multiplied by tau_eff, so a site that claims work without end must not lengthen it.
        """
        most = effective_steps(local_steps(self.run.training, update.examples), self.run.training)
        return min(update.metrics[EFFECTIVE_STEPS], most)

    def _stretched(self, state: State, update: Update, factor: float) -> Update:
        """Return the update with its steps times `factor`, or as far as the run's largest norm allows.

        What was sent was judged by that norm, but who makes few steps is stretched many times.
        """
        most, norm = self.run.max_update_norm, update.metrics.get(UPDATE_NORM)
        if most is not None and norm:
            factor = min(factor, most / norm)
        blocks = {name: Stretched(state.model[name], tensor, factor) for name, tensor in update.blocks.items()}
        return replace(update, blocks=blocks)

    def check_robust(self) -> None:
        """tau_eff, which follows from what workers say of themselves, is then their median."""


class FedNovaWorker(WorkerHalf[MethodSettings]):
    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        metrics = {EFFECTIVE_STEPS: effective_steps(stats.steps, self.run.training)}
        return replace(super().collect(context, selected, stats), metrics=metrics)


METHOD = Method(
    name="fednova",
    settings=MethodSettings,
    coordinator=FedNovaCoordinator,
    worker=FedNovaWorker,
    source="Wang et al., Tackling the Objective Inconsistency Problem, arXiv 2007.07481, Section 4",
)
