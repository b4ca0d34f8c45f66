"""Privacy accounting: the cost of composed mechanisms, and the noise for a target. Needs the extra `privacy`.

Neighbouring data sets differ in one unit, an example or a group of examples, which one of them lacks. Noisy steps are
composed by their privacy loss distributions (Koskela et al. 2020, arXiv 1906.03049; Doroshenko et al. 2022, arXiv
2207.04380), which dp-accounting rounds towards more epsilon; noisy choices and figures, which have no such
distribution, by Renyi differential privacy.

Composition assumes settings that are fixed beforehand, as within a run. Between runs, people choose settings by the
results of earlier runs, so a site's budget is a filter (`admits`; docs/decisions/0040-budget-as-filter.md).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy.optimize import brentq

from tessera.shared.run_settings import Budget
from tessera.shared.tensors.lazy import Array
from tessera.worker.state.privacy_ledger import Cost, ExactUse, NoisySteps, OneInGroup

MIN_NOISE = 0.3125
"""Lower limit on the noise multiplier of any target: with less noise there is no meaningful privacy."""
MAX_NOISE = 1e4

# No fractional orders: the library drops those whose series does not converge, with a warning.
ORDERS: tuple[int, ...] = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256, 512)

TOLERANCE = 1.001
"""Limit on the ratio of the chosen noise to the least noise that meets the target."""
LOSS_GRID = 1e-3
"""Grid to which the losses of a step are rounded up, at a noise multiplier of 1. A tenfold finer grid changes epsilon
by less than one in a thousand, and takes ten times as long."""

GRID_BITS = 10
"""Bits of the mantissas of noise and rate. They are rounded towards more epsilon, by less than 0.2 %, so that similar
runs are composed once; the noise that is chosen here is on this grid."""
MAX_COMPOSED = 64
"""Limit on different mechanisms in an exact composition. More of them are bounded by Renyi differential privacy,
which is fast and never below the exact value."""

_Steps = tuple[tuple[float, float, bool, int], ...]
"""Noise, rate, whether they are an example's in its group (`OneInGroup`), and number of steps."""


class Overspent(ValueError):
    """A budget that is too small for the requested events."""


def epsilon(events: Iterable[Cost], delta: float) -> float:
    """Return the epsilon of all events together at `delta`, if their settings were fixed beforehand."""
    return _epsilon(*_sums(events), delta)


def within(events: Iterable[Cost], budget: Budget) -> bool:
    """Return True if all events together stay within a run's target, if their settings were fixed beforehand."""
    steps, rho = _sums(events)
    # The fast bound decides most cases.
    return _renyi(steps, rho, budget.delta) <= budget.epsilon or _epsilon(steps, rho, budget.delta) <= budget.epsilon


def admits(events: Iterable[Cost], budget: Budget) -> bool:
    """Return True if a site's budget covers the events, even if each was chosen by the results of earlier ones."""
    return _admits(*_sums(events), budget)


def least_budget(events: Iterable[Cost], delta: float) -> float:
    """Return the least epsilon of a budget at `delta` that admits the events, rounded up by at most TOLERANCE.

    Infinite if no budget admits them.
    """
    return _least_budget(*_sums(events), delta)


def noise_multiplier(target: Budget, spent: Iterable[Cost], sampling_rate: float, steps: int) -> float:
    """Return the least noise multiplier with which the steps and the spent events stay within the target.

    Raises Overspent if no noise suffices.
    """
    # Rounding up adds less than the tolerance, and never spends more.
    return _on_grid(_noise_multiplier(target, *_sums(spent), _on_grid(sampling_rate, math.ceil), steps), math.ceil)


def _sums(events: Iterable[Cost]) -> tuple[_Steps, float]:
    """Return the number of steps by noise and rate, and the sum of the choices' zCDP.

    A run is thus composed once for all of its tasks. The steps keep their order, so that new ones are composed with
    the cached composition of the earlier ones.
    """
    steps: Counter[tuple[float, float, bool]] = Counter()
    rho = 0.0
    for cost in events:
        event, in_group = (cost.steps, True) if isinstance(cost, OneInGroup) else (cost, False)
        if isinstance(event, NoisySteps):
            noise, rate = _on_grid(event.noise_multiplier, math.floor), _on_grid(event.sampling_rate, math.ceil)
            if in_group and rate >= 1:
                # Without sampling, to move by two clip norms is to have half of the noise.
                noise, in_group = noise / 2, False
            steps[noise, rate, in_group] += event.steps
        elif isinstance(event, ExactUse):
            raise ValueError(f"{event.use} is released without noise, so no epsilon bounds it")
        else:
            rho += event.rho
    return tuple((*mechanism, count) for mechanism, count in steps.items()), rho


def _on_grid(value: float, rounded: Callable[[float], int]) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(rounded(mantissa * 2**GRID_BITS), exponent - GRID_BITS)


@lru_cache(maxsize=1024)
def _noise_multiplier(target: Budget, spent: _Steps, rho: float, rate: float, steps: int) -> float:
    def renyi(noise: float) -> float:
        return _renyi((*spent, (noise, rate, False, steps)), rho, target.delta)

    def exact(noise: float) -> float:
        return _epsilon((*spent, (noise, rate, False, steps)), rho, target.delta)

    # The fast bound is never below the exact value, so it limits the search for the exact one.
    high = _least(renyi, target.epsilon, MIN_NOISE, MAX_NOISE)
    low = MIN_NOISE if high == MAX_NOISE else max(MIN_NOISE, high / 2)
    noise = _least(exact, target.epsilon, low, high)
    if exact(noise) > target.epsilon:
        raise Overspent(f"too little is left of epsilon {target.epsilon:g} at delta {target.delta:g}")
    return noise


def _least(cost: Callable[[float], float], most: float, low: float, high: float) -> float:
    """Return the least noise from `low` to `high`, within TOLERANCE, that costs no more than `most`, or `high`."""

    def excess(log_noise: float) -> float:
        return math.log(max(cost(math.exp(log_noise)), 1e-12) / most)

    if excess(math.log(high)) > 0:
        return high
    if excess(math.log(low)) <= 0:
        return low
    noise = math.exp(brentq(excess, math.log(low), math.log(high), xtol=math.log(TOLERANCE) / 2))
    while cost(noise) > most:
        noise *= math.sqrt(TOLERANCE)
    return min(noise, high)


@lru_cache(maxsize=1024)
def _admits(steps: _Steps, rho: float, budget: Budget) -> bool:
    # Half of delta is for each of two kinds of histories. In the first, only the number of steps ever changed, so
    # each history is a prefix of a composition that was fixed beforehand. All others use the Renyi filter.
    half = Budget(epsilon=budget.epsilon, delta=budget.delta / 2)
    # The filter is faster.
    if _renyi(steps, rho, half.delta, (_filter_order(half),)) <= half.epsilon:
        return True
    return len(steps) == 1 and not rho and not _in_group(steps) and _epsilon(steps, rho, half.delta) <= half.epsilon


def _filter_order(budget: Budget) -> int:
    """Return the Renyi order of a budget's filter.

    The proof of the filter needs an order that is fixed beforehand (Feldman and Zrnic 2021, arXiv 2008.11193), so the
    order depends on the budget alone. This order admits the most releases by Gaussian noise without sampling.
    """

    def most(order: int) -> float:
        # The largest Renyi divergence that implies (epsilon, delta): Canonne, Kamath and Steinke 2020, arXiv
        # 2004.00010, proposition 12.
        log = math.log(budget.delta * order)
        return budget.epsilon - math.log1p(-1 / order) + log / (order - 1)

    return max(ORDERS, key=lambda order: most(order) / order)


@lru_cache(maxsize=1024)
def _least_budget(steps: _Steps, rho: float, delta: float) -> float:
    low, high = 1e-3, 1e3
    if not _admits(steps, rho, Budget(epsilon=high, delta=delta)):
        return math.inf
    while high > low * TOLERANCE:
        middle = math.sqrt(low * high)
        if _admits(steps, rho, Budget(epsilon=middle, delta=delta)):
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=1024)
def _epsilon(steps: _Steps, rho: float, delta: float) -> float:
    if not steps or len(steps) > MAX_COMPOSED or _in_group(steps):
        return _renyi(steps, rho, delta)
    if not rho:
        return _loss(steps, delta)
    # Both bounds are valid: all events in one accountant, or each kind in its own at half of delta.
    return min(_renyi(steps, rho, delta), _loss(steps, delta / 2) + _renyi((), rho, delta / 2))


def _in_group(steps: _Steps) -> bool:
    """Return True if some steps are an example's in its group: their privacy loss distribution is not known."""
    return any(in_group for _, _, in_group, _ in steps)


def _loss(steps: _Steps, delta: float) -> float:
    # With much noise, losses are small and the grid must be fine. With little noise, a fine grid would exhaust
    # memory. The grid is a power of two, so that cached compositions of other runs are reused.
    noises = [noise for noise, *_ in steps]
    finer = max(1.0, min(max(noises), 8 * min(noises)))
    grid = LOSS_GRID / 2 ** math.ceil(math.log2(finer))
    return float(_composed(steps, grid).get_epsilon_for_delta(delta))


@lru_cache(maxsize=MAX_COMPOSED + 8)
def _composed(steps: _Steps, grid: float) -> PrivacyLossDistribution:
    *before, (noise, rate, _, count) = steps
    alone = _distribution(noise, rate, count, grid)
    return _composed(tuple(before), grid).compose(alone) if before else alone


@lru_cache(maxsize=MAX_COMPOSED + 8)
def _distribution(noise: float, rate: float, count: int, grid: float) -> PrivacyLossDistribution:
    """Return the distribution of `count` steps, rounded up to the grid."""
    if rate < 1:
        step = from_gaussian_mechanism(noise, value_discretization_interval=grid, sampling_prob=rate)
        return step.self_compose(count)
    # Without sampling, several steps equal one with less noise.
    return from_gaussian_mechanism(noise / math.sqrt(count), value_discretization_interval=grid)


@lru_cache(maxsize=1024)
def _renyi(steps: _Steps, rho: float, delta: float, orders: tuple[int, ...] = ORDERS) -> float:
    divergences = np.zeros(len(orders))
    for noise, rate, in_group, count in steps:
        divergences += count * (_in_group_divergences if in_group else _divergences)(noise, rate, orders)
    divergences += rho * np.array(orders)
    return float(compute_epsilon(orders, divergences, delta)[0])


@lru_cache(maxsize=1 << 14)
def _divergences(noise: float, rate: float, orders: tuple[int, ...]) -> Array:
    """Return the Renyi divergences of one step."""
    accountant = RdpAccountant(orders)
    step: DpEvent = GaussianDpEvent(noise)
    accountant.compose(PoissonSampledDpEvent(rate, step) if rate < 1 else step)
    divergences: Array = accountant.rdp
    return divergences


def _in_group_divergences(noise: float, rate: float, orders: tuple[int, ...]) -> Array:
    """Return the Renyi divergences of one step of groups between data sets that differ in an example of a group.

    Each is a step from the data set without the group, so that the weak triangle inequality bounds them (Mironov
    2017, arXiv 1702.07476, proposition 11, with p = q = 2).
    """
    at = np.array(orders)
    first = _divergences(noise, rate, tuple(2 * order for order in orders))
    second = _divergences(noise, rate, tuple(2 * order - 1 for order in orders))
    bounds: Array = (at - 0.5) / (at - 1) * first + second
    return bounds
