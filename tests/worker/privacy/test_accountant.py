"""What mechanisms cost together: against formulas that can be written out, and against a second accountant."""

from __future__ import annotations

import math
import random
import warnings
from itertools import pairwise

import numpy as np
import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from tessera.shared.run_settings import Budget, about_together, rho_of
from tessera.worker.privacy.accountant import (
    MAX_COMPOSED,
    MIN_NOISE,
    TOLERANCE,
    Overspent,
    _composed,
    _distribution,
    _divergences,
    _filter_order,
    _in_group_divergences,
    _loss,
    admits,
    epsilon,
    least_budget,
    noise_multiplier,
    within,
)
from tessera.worker.state.privacy_ledger import NoisyChoice, NoisySteps, OneInGroup

DELTA = 1e-5


def steps(noise: float, rate: float, count: int) -> NoisySteps:
    return NoisySteps(noise_multiplier=noise, sampling_rate=rate, steps=count)


# Runs of 40 to 3,750 steps, from batches of a sixtieth of the data to all of it.
SETTINGS = [
    (1.35, 0.016, 3750),
    (0.92, 0.016, 3750),
    (1.0, 0.1, 100),
    (2.0, 0.5, 50),
    (1.0, 0.25, 40),
    (5.0, 1.0, 50),
]
SHORT = {SETTINGS[0], SETTINGS[2], SETTINGS[5]}


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize(
    ("noise", "rate", "count"),
    [each if each in SHORT else pytest.param(*each, marks=pytest.mark.long) for each in SETTINGS],
)
def test_epsilon_agrees_with_opacus_to_one_percent(noise: float, rate: float, count: int) -> None:
    theirs = PRVAccountant()
    theirs.history = [(noise, rate, count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid logarithms in densities that are zero
        second = theirs.get_epsilon(DELTA, eps_error=0.005)
    assert epsilon([steps(noise, rate, count)], DELTA) == pytest.approx(second, rel=0.01)


@pytest.mark.usefixtures("fine_grid")
def test_renyi_accounting_never_says_less() -> None:
    for noise, rate, count in SETTINGS:
        theirs = RDPAccountant()
        theirs.history = [(noise, rate, count)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert epsilon([steps(noise, rate, count)], DELTA) <= theirs.get_epsilon(DELTA)


def test_epsilon_is_composed_over_rounds_and_knows_nothing_of_blocks() -> None:
    # Ten rounds of ten steps, whatever they trained, cost what a hundred steps do.
    rounds = [steps(1.0, 0.1, 10)] * 10
    assert epsilon(rounds, DELTA) == epsilon([steps(1.0, 0.1, 100)], DELTA)
    assert epsilon(rounds, DELTA) > epsilon(rounds[:9], DELTA)


@pytest.mark.usefixtures("fine_grid")
def test_one_gaussian_step_costs_what_the_exact_formula_says() -> None:
    # Balle and Wang 2018, arXiv 1805.06530, theorem 8: delta = Phi(1/2z - ez) - e^e Phi(-1/2z - ez).
    z, e = 2.0, epsilon([steps(2.0, 1.0, 1)], DELTA)
    phi = lambda x: math.erfc(-x / math.sqrt(2)) / 2  # noqa: E731
    assert phi(1 / (2 * z) - e * z) - math.exp(e) * phi(-1 / (2 * z) - e * z) == pytest.approx(DELTA, rel=0.01)


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize(
    ("target", "rate", "count"),
    [(0.5, 0.05, 200), *(pytest.param(*each, marks=pytest.mark.long) for each in ((3.0, 0.1, 100), (8.0, 0.25, 40)))],
)
def test_the_noise_for_a_target_meets_it_and_hardly_more(target: float, rate: float, count: int) -> None:
    noise = noise_multiplier(Budget(epsilon=target, delta=DELTA), [], rate, count)
    assert epsilon([steps(noise, rate, count)], DELTA) <= target
    assert epsilon([steps(noise / 1.003, rate, count)], DELTA) > target


def test_what_was_spent_before_takes_more_noise() -> None:
    target = Budget(epsilon=3.0, delta=DELTA)
    noises = [noise_multiplier(target, [steps(2.5, 0.1, before)] if before else [], 0.1, 100) for before in (0, 90)]
    assert all(less < more for less, more in pairwise(noises))
    assert within([steps(2.5, 0.1, 90), steps(noises[1], 0.1, 100)], target)


def test_a_spent_target_has_no_noise_that_would_do() -> None:
    with pytest.raises(Overspent, match="epsilon 1 at delta 1e-05"):
        noise_multiplier(Budget(epsilon=1.0, delta=DELTA), [steps(1.0, 0.5, 50)], 0.1, 1)


def test_a_generous_target_still_gets_some_noise() -> None:
    assert noise_multiplier(Budget(epsilon=900.0, delta=DELTA), [], 0.01, 10) == MIN_NOISE


def test_choices_cost_their_zcdp() -> None:
    # Ten of 0.01 are 0.1-zCDP, hence at most 0.1 + 2 sqrt(0.1 log(1/delta)) = 2.246; the tight conversion says less.
    choices = [NoisyChoice(rho=0.01)] * 10
    bound = 0.1 + 2 * math.sqrt(0.1 * math.log(1 / DELTA))
    assert 0.85 * bound < epsilon(choices, DELTA) <= bound
    assert rho_of(Budget(epsilon=bound, delta=DELTA)) == pytest.approx(0.1)


def test_runs_together_cost_about_what_is_estimated_of_their_targets() -> None:
    runs = [[steps(1.5, 0.1, 100)], [steps(2.5, 0.05, 400)]]
    targets = [Budget(epsilon=epsilon(run, DELTA), delta=DELTA) for run in runs]
    assert about_together(targets[:1], DELTA) == pytest.approx(targets[0].epsilon)
    exact = epsilon([event for run in runs for event in run], DELTA)
    assert about_together(targets, DELTA) == pytest.approx(exact, rel=0.1)


def test_choices_and_steps_together_cost_more_than_either_and_no_more_than_both() -> None:
    choices, trained = [NoisyChoice(rho=0.002)] * 10, [steps(1.5, 0.1, 100)]
    both = epsilon([*choices, *trained], DELTA)
    assert max(epsilon(choices, DELTA), epsilon(trained, DELTA)) < both
    assert both <= epsilon(choices, DELTA / 2) + epsilon(trained, DELTA / 2)


def test_a_round_more_is_composed_alone_and_what_was_there_before_is_known() -> None:
    before = [steps(1.0 + number / 10, 0.1, 20) for number in range(4)]
    epsilon([*before, steps(3.0, 0.1, 20)], DELTA)
    known = _distribution.cache_info().misses, _composed.cache_info().misses
    epsilon([*before, steps(3.0, 0.1, 40)], DELTA)
    assert (_distribution.cache_info().misses, _composed.cache_info().misses) == (known[0] + 1, known[1] + 1)


def test_mechanisms_that_are_nearly_alike_are_composed_as_one_that_costs_no_less() -> None:
    alike = [steps(1.3 + number / 10_000, 0.1 - number / 100_000, 20) for number in range(3)]
    misses = _distribution.cache_info().misses
    together = epsilon(alike, DELTA)
    assert _distribution.cache_info().misses - misses <= 2
    assert together >= _loss(((1.3, 0.1, False, 60),), DELTA) * (1 - 1e-3)
    assert together <= _loss(((1.3, 0.1, False, 60),), DELTA) * 1.005


def test_of_very_many_different_mechanisms_a_quick_bound_is_taken_that_is_not_below() -> None:
    many = [steps(2.0 + number / 50, 0.1, 5) for number in range(MAX_COMPOSED + 1)]
    misses = _distribution.cache_info().misses
    bound = epsilon(many, DELTA)
    assert _distribution.cache_info().misses == misses
    assert bound > epsilon([steps(3.3, 0.1, 5 * len(many))], DELTA)


def test_the_noise_for_a_target_is_on_the_grid_so_that_none_of_it_is_lost() -> None:
    noise = noise_multiplier(Budget(epsilon=3.0, delta=DELTA), [], 0.1, 100)
    assert (noise * 2**10 / 2 ** math.ceil(math.log2(noise))).is_integer()


# ---------------------------------------------------------------- a site's budget


def converted(divergence: float, order: int, delta: float) -> float:
    """Canonne, Kamath and Steinke 2020, arXiv 2004.00010, proposition 12."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def test_of_gaussian_noise_a_budget_admits_what_can_be_written_out() -> None:
    # At epsilon 4.5 and half of delta 1e-5 the order is 6. One step without sampling adds 6 / (2 noise^2).
    # 50 of noise 10 and 9 of noise 5 are 1.5 + 1.08 = 2.58, hence 2.58 - 0.182 + 10.414 / 5 = 4.48.
    assert _filter_order(Budget(epsilon=4.5, delta=DELTA / 2)) == 6
    assert least_budget([steps(10.0, 1.0, 50), steps(5.0, 1.0, 9)], DELTA) == pytest.approx(4.48, rel=2e-3)


@pytest.mark.usefixtures("fine_grid")
def test_one_run_alone_costs_a_few_percent_more_than_its_target() -> None:
    for noise, rate, count in SETTINGS:
        alone = [steps(noise, rate, count)]
        assert epsilon(alone, DELTA) < least_budget(alone, DELTA) <= TOLERANCE * epsilon(alone, DELTA / 2)


def test_an_adversary_that_picks_each_setting_by_the_last_answer_stays_within_the_budget() -> None:
    budget, dice = Budget(epsilon=6.0, delta=DELTA), random.Random(1)
    order = _filter_order(Budget(epsilon=6.0, delta=DELTA / 2))
    choices = [(1.5, 0.05, 40), (2.0, 0.2, 10), (6.0, 1.0, 2), (1.0, 0.02, 60)]
    for _ in range(10):
        history: list[NoisySteps] = []
        open_to = list(choices)
        while open_to:
            event = steps(*dice.choice(open_to))
            if admits([*history, event], budget):
                history.append(event)
            else:
                open_to.remove((event.noise_multiplier, event.sampling_rate, event.steps))
        # By the other library, and in the one order that has nothing to do with the history.
        divergence = sum(
            compute_rdp(q=one.sampling_rate, noise_multiplier=one.noise_multiplier, steps=one.steps, orders=[order])[
                0
            ]
            for one in history
        )
        assert 0.8 * budget.epsilon < converted(divergence, order, DELTA / 2) <= budget.epsilon


def test_after_a_history_of_one_setting_the_filter_judges_all_of_it() -> None:
    before = [steps(2.0, 0.05, 1000)]
    budget = Budget(epsilon=least_budget(before, DELTA), delta=DELTA)
    assert admits(before, budget)
    # While nothing changed, the exact composition held. Now the filter would have to: of nothing else even a little.
    assert not admits([*before, steps(50.0, 0.05, 1)], budget)
    assert not admits([*before, NoisyChoice(rho=1e-6)], budget)
    assert admits([steps(2.0, 0.05, 800), steps(50.0, 0.05, 1), NoisyChoice(rho=1e-6)], budget)


def test_what_a_larger_budget_admits_includes_what_a_smaller_one_does() -> None:
    events = [steps(1.0, 0.02, 60), steps(2.0, 0.2, 10), NoisyChoice(rho=0.01)]
    least = least_budget(events, DELTA)
    budgets = [Budget(epsilon=least * 1.02**power, delta=DELTA) for power in range(-20, 200)]
    assert [admits(events, budget) for budget in budgets] == [False] * 20 + [True] * 200
    assert least_budget([], DELTA) < 0.01
    assert least_budget([steps(0.3125, 1.0, 5000), NoisyChoice(rho=1.0)], DELTA) == math.inf


def test_a_filter_that_goes_on_while_any_order_has_room_would_let_an_adversary_exceed_delta() -> None:
    """Why the order is fixed beforehand: of two orders, an adversary takes the one that its first answer favours."""
    target, low, high = 8.0, 3, 8
    first = 0.1  # times its order, a Gaussian's divergence; its loss is normal with this mean and twice this variance
    total, width = 0.0, 0.01
    for number in range(-300, 400):
        loss = number * width
        order = high if loss > (low + high - 1) * first else low
        room = target - converted(0.0, order, DELTA) - order * first
        # The second answer tells with this chance, by as much as hurts most, and has the divergence that is left.
        tells = target - loss + math.log(order / (order - 1))
        chance = math.expm1((order - 1) * room) * math.exp(-(order - 1) * tells)
        density = math.exp(-((loss - first) ** 2) / (4 * first)) / math.sqrt(4 * math.pi * first)
        total += width * density * chance / order if chance < 0.9 else 0.0
    assert total > 1.6 * DELTA


# ---------------------------------------------------------------- one example of a group


def test_without_sampling_an_example_of_a_group_sees_half_of_the_noise() -> None:
    steps = NoisySteps(noise_multiplier=4.0, sampling_rate=1.0, steps=10)
    halved = NoisySteps(noise_multiplier=2.0, sampling_rate=1.0, steps=10)
    assert epsilon([OneInGroup(steps)], 1e-5) == epsilon([halved], 1e-5)
    assert least_budget([OneInGroup(steps)], 1e-5) == least_budget([halved], 1e-5)


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (2.0, 0.3), (0.7, 0.02)])
def test_the_bound_for_an_example_of_a_group_holds_for_opposite_gradients(noise: float, rate: float) -> None:
    # The worst that is known: the group's gradient turns from one end of the ball to the other. Integrated here.
    grid = np.linspace(-25 * noise, 25 * noise, 100_001)

    def density(mean: float) -> np.ndarray:
        return np.exp(-((grid - mean) ** 2) / (2 * noise**2)) / (noise * np.sqrt(2 * np.pi))

    one, other = ((1 - rate) * density(0) + rate * density(mean) for mean in (1.0, -1.0))
    bounds = _in_group_divergences(noise, rate, (2, 4, 8))
    plain = _divergences(noise, rate, (2, 4, 8))
    for order, bound, of_group in zip((2, 4, 8), bounds, plain, strict=True):
        exact = np.log(np.trapezoid(other * (one / other) ** order, grid)) / (order - 1)
        assert of_group < exact <= bound


def test_a_group_costs_an_example_about_four_times_its_divergence() -> None:
    (bound,) = _in_group_divergences(20.0, 0.1, (8,))
    (of_group,) = _divergences(20.0, 0.1, (8,))
    assert bound == pytest.approx(4 * of_group, rel=0.1)


def test_steps_of_one_setting_count_by_the_filter_if_they_are_of_a_group() -> None:
    steps = NoisySteps(noise_multiplier=2.0, sampling_rate=0.1, steps=100)
    alone, in_group = least_budget([steps], 1e-5), least_budget([OneInGroup(steps)], 1e-5)
    assert 1.5 * alone < in_group < 4 * alone
    assert not admits([OneInGroup(steps)], Budget(epsilon=alone, delta=1e-5))
    assert admits([OneInGroup(steps)], Budget(epsilon=in_group, delta=1e-5))
