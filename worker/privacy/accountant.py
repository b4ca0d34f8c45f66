"""What mechanisms cost together, and how much noise a target needs. Needs the extra `privacy`.

Of two neighbouring data sets one has nothing in the place of one example of the other. Noisy steps are composed by
their privacy loss distributions (Koskela et al. 2020, arXiv 1906.03049; Doroshenko et al. 2022, arXiv 2207.04380),
which dp-accounting rounds towards more epsilon; noisy choices, which have none, in Renyi differential privacy.

That holds for settings that were fixed beforehand, as within a run. Over runs people choose settings by what earlier
ones told, so a site's budget is a filter (`admits`; docs/decisions/0040-a-budget-is-a-filter.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import ZCDpEvent
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq

from tessera.shared.run_settings import Budget
from tessera.worker.state.privacy_ledger import Event, NoisyChoice, NoisySteps

MIN_NOISE = 0.3125
"""No target is met with a smaller noise multiplier: what it would promise is not worth the name."""
MAX_NOISE = 1e4

# Fractional orders are dropped, with a warning, wherever their series does not converge.
ORDERS: tuple[int, ...] = (*range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256, 512)

TOLERANCE = 1.001
"""How far above the least noise that a target needs ours may be, as a factor."""
LOSS_GRID = 1e-3
"""How coarsely the losses of a step are rounded, upwards, at a noise multiplier of 1. Tenfold finer changes epsilon
by less than one in a thousand, and takes ten times as long."""

GRID_BITS = 10
"""Of the mantissas of noise and rate. They are rounded towards more epsilon, by less than 0.2 %, so that runs which
are nearly alike are composed once; the noise that is chosen here is on this grid."""
MAX_COMPOSED = 64
"""Of more different mechanisms together, only the bound in Renyi differential privacy is worked out: it is never
below the truth, and quick."""

_Steps = tuple[tuple[float, float, int], ...]


class Overspent(ValueError):
    """A budget does not hold what is asked of it."""


def epsilon(events: Iterable[Event], delta: float) -> float:
    """Return what all of the events together cost at this delta, if their settings were fixed beforehand."""
    steps, rho = _sums(events)
    return _epsilon(steps, rho, delta)


def within(events: Iterable[Event], budget: Budget) -> bool:
    """Return whether all of the events together fit into a run's target, if their settings were fixed beforehand."""
    steps, rho = _sums(events)
    # The quick bound decides most cases.
    return _renyi(steps, rho, budget.delta) <= budget.epsilon or _epsilon(steps, rho, budget.delta) <= budget.epsilon


def admits(events: Iterable[Event], budget: Budget) -> bool:
    """Return whether a site's budget holds the events, even if each was chosen by what those before told."""
    return _admits(*_sums(events), budget)


def least_budget(events: Iterable[Event], delta: float) -> float:
    """Return the least epsilon of a budget at `delta` that admits the events, within TOLERANCE and never below it.

    Infinite if no budget does.
    """
    return _least_budget(*_sums(events), delta)


def noise_multiplier(target: Budget, spent: Iterable[Event], sampling_rate: float, steps: int) -> float:
    """Return the least noise with which so many steps fit into what the spent events leave of the target.

    Raises Overspent if no noise does.
    """
    # Rounding up moves it by less than the tolerance, and no more than that is spent.
    return _on_grid(_noise_multiplier(target, *_sums(spent), _on_grid(sampling_rate, math.ceil), steps), math.ceil)


def _sums(events: Iterable[Event]) -> tuple[_Steps, float]:
    """Steps by noise and rate, so that a run is composed once however many tasks it had; and the choices' zCDP.

    In the order in which they came: what is new is composed with what was there before, which is known already.
    """
    steps: Counter[tuple[float, float]] = Counter()
    rho = 0.0
    for event in events:
        if isinstance(event, NoisySteps):
            noise, rate = _on_grid(event.noise_multiplier, math.floor), _on_grid(event.sampling_rate, math.ceil)
            steps[noise, rate] += event.steps
        elif isinstance(event, NoisyChoice):
            rho += event.rho
        else:
            raise ValueError(f"no noise covers {event.use}, so no epsilon bounds it")
    return tuple((noise, rate, count) for (noise, rate), count in steps.items()), rho


def _on_grid(value: float, rounded: Callable[[float], int]) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(rounded(mantissa * 2**GRID_BITS), exponent - GRID_BITS)


@lru_cache(maxsize=1024)
def _noise_multiplier(target: Budget, spent: _Steps, rho: float, rate: float, steps: int) -> float:
    def renyi(noise: float) -> float:
        return _renyi((*spent, (noise, rate, steps)), rho, target.delta)

    def exact(noise: float) -> float:
        return _epsilon((*spent, (noise, rate, steps)), rho, target.delta)

    # The quick bound first: it is never below the truth, so most of the search can be left to it.
    high = _least(renyi, target.epsilon, MIN_NOISE, MAX_NOISE)
    low = MIN_NOISE if high == MAX_NOISE else max(MIN_NOISE, high / 2)
    noise = _least(exact, target.epsilon, low, high)
    if exact(noise) > target.epsilon:
        raise Overspent(f"nothing is left of epsilon {target.epsilon:g} at delta {target.delta:g}")
    return noise


def _least(cost: Callable[[float], float], most: float, low: float, high: float) -> float:
    """Return the least noise, to within TOLERANCE, that costs no more than `most`; `low` or `high` if it is beyond
    them."""

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
    # Half of delta for each of two kinds of histories. In one nothing ever changed but the number of steps: each is
    # the beginning of a composition that was fixed beforehand. All others keep to the Renyi filter.
    half = Budget(epsilon=budget.epsilon, delta=budget.delta / 2)
    # The filter is the quicker one.
    if _renyi(steps, rho, half.delta, (_filter_order(half),)) <= half.epsilon:
        return True
    return len(steps) == 1 and not rho and _epsilon(steps, rho, half.delta) <= half.epsilon


def _filter_order(budget: Budget) -> int:
    """Return the one order in which a budget's filter counts.

    A filter is proven for an order that is fixed beforehand (Feldman and Zrnic 2021, arXiv 2008.11193), so the order
    follows from the budget alone: the one that admits the most Gaussian noise without sampling.
    """

    def most(order: int) -> float:
        # The Renyi divergence that still is (epsilon, delta): Canonne, Kamath and Steinke 2020, arXiv 2004.00010,
        # proposition 12, solved for it.
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
    if not steps or len(steps) > MAX_COMPOSED:
        return _renyi(steps, rho, delta)
    if not rho:
        return _loss(steps, delta)
    # Two bounds, both valid: everything in one accountant, or each kind in its own at half of delta.
    return min(_renyi(steps, rho, delta), _loss(steps, delta / 2) + _renyi((), rho, delta / 2))


def _loss(steps: _Steps, delta: float) -> float:
    # Where noise is large losses are small, and the grid must be fine. Not where noise is small: it would take all
    # the memory there is. In powers of two, so that what other runs have spent is worked out once.
    noises = [noise for noise, _, _ in steps]
    finer = max(1.0, min(max(noises), 8 * min(noises)))
    grid = LOSS_GRID / 2 ** math.ceil(math.log2(finer))
    return float(_composed(steps, grid).get_epsilon_for_delta(delta))


@lru_cache(maxsize=MAX_COMPOSED + 8)
def _composed(steps: _Steps, grid: float) -> PrivacyLossDistribution:
    *before, last = steps
    alone = _distribution(*last, grid)
    return _composed(tuple(before), grid).compose(alone) if before else alone


@lru_cache(maxsize=MAX_COMPOSED + 8)
def _distribution(noise: float, rate: float, count: int, grid: float) -> PrivacyLossDistribution:
    """Of so many steps, rounded upwards to the grid."""
    if rate < 1:
        step = from_gaussian_mechanism(noise, value_discretization_interval=grid, sampling_prob=rate)
        return step.self_compose(count)
    # Without sampling, steps together are one with less noise.
    return from_gaussian_mechanism(noise / math.sqrt(count), value_discretization_interval=grid)


@lru_cache(maxsize=1024)
def _renyi(steps: _Steps, rho: float, delta: float, orders: tuple[int, ...] = ORDERS) -> float:
    accountant = RdpAccountant(orders)
    accountant.compose(ComposedDpEvent([*(_event(*each) for each in steps), ZCDpEvent(rho=rho)]))
    return float(accountant.get_epsilon(delta))


def _event(noise: float, rate: float, count: int) -> DpEvent:
    step: DpEvent = GaussianDpEvent(noise)
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, step) if rate < 1 else step, count)
