"""The local work of an update: the sum that divides its step, so that a site with more steps does not count more.

FedNova (Wang et al. 2020, Tackling the Objective Inconsistency Problem, arXiv 2007.07481, Section 4): with p_k the
share of the examples, d_k the update and a_k the l1 norm of its accumulation vector, the effective steps,

    w = w + tau_eff sum_k p_k d_k / a_k,    tau_eff = sum_k p_k a_k

Plain SGD has a_k = steps. With momentum rho, a_k is the sum over the steps of the counter c = rho c + 1. Under a
schedule each step counts with its share of the learning rate: the vector covers variable rates. Rates by role scale a
block's d_k and a_k alike at all sites, so that they cancel out. FedProx's term pulls each step back: an earlier
gradient counts 1 - rate mu times as much after each (ibid., without momentum), so that a_k nears 1 / (rate mu). AdamW
has no such vector: the steps replace it, without the paper's proof. If all a_k are equal it is FedAvg, bit for bit.
Blocks that only some workers sent are averaged by the run's `normalization`, with the same scaling. No step is scaled
to more than the run's `max_update_norm`. A site whose weight is capped by the run's `max_examples` counts in tau_eff
with the a_k of that many examples.
"""

from collections.abc import Sequence
from math import fsum
from statistics import median

from tessera.shared.run_settings import Training
from tessera.shared.schedule import rate_factors, require_summable

EFFECTIVE_STEPS = "effective_steps"
"""The metric with a_k, which a worker reports with its update."""
ROUND = "round"
"""The round in a plan's scalars, on which the rates of a schedule depend."""
ROUNDING = 1e-9
"""The relative tolerance of a reported sum, for a worker that adds up step by step and rounds at each."""


def effective_steps(steps: int, training: Training, round_number: int = 1, rounds: int = 1, mu: float = 0.0) -> float:
    """Return a_k: the factor of a constant gradient in the update, in units of the learning rate. `mu` is the weight
    of FedProx's term.

    Takes one iteration per binary digit of `steps`. The closed form, (n - rho (1 - rho^n) / (1 - rho)) / (1 - rho),
    loses precision where rho is close to 1; doubling adds only positive numbers. Under a schedule, which depends on
    the round, and with `mu`, it takes one iteration per step, and raises ValueError for too many of them.
    """
    momentum, pull = training.momentum, training.learning_rate * mu
    if training.optimizer != "sgd":
        momentum = pull = 0.0
    if training.scheduled or pull:
        require_summable(training, steps, alike=not pull)
        moved, velocity = 0.0, 0.0
        for factor in rate_factors(training, steps, round_number, rounds):
            velocity = momentum * velocity + 1 - pull * moved
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


def require_equal(reported: float | None, expected: float, examples: int) -> None:
    """Raise ValueError for a report of other effective steps than `expected`: a claim of more work would scale up the
    steps of all workers, a claim of less the worker's own."""
    if not abs((reported or 0.0) - expected) <= ROUNDING * expected:
        raise ValueError(f"{EFFECTIVE_STEPS} is {reported}; {examples} examples make it {expected:g}")


def ratios(own: Sequence[float], most: Sequence[float], weights: Sequence[float] | None) -> list[float]:
    """Return tau_eff / a_k for each update, from its effective steps and the most that count in the mean; exactly 1
    if all are equal. Without weights, where a robust rule weighs all alike, tau_eff is the median of `own`."""
    if len(set(own)) <= 1:
        return [1.0] * len(own)
    if weights is None:
        whole = median(own)
    else:
        counted = map(min, own, most)
        whole = fsum(n * steps for n, steps in zip(weights, counted, strict=True)) / fsum(weights)
    return [whole / steps for steps in own]
