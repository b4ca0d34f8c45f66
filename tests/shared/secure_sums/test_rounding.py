"""Steps become integers without bias, and no sum of them overflows."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.messages import RingBlock
from tessera.shared.secure_sums.opened import MeanStep, OpenedSum
from tests.support.secure_sums import Federation, integers_of


@pytest.mark.parametrize("bits", [16, 32])
def test_the_largest_steps_of_all_senders_do_not_overflow(bits: int) -> None:
    for sites in (3, 5, 200, 257):
        terms = Federation(sites, 3, bits=bits, sizes={"head": 2}).terms()
        steps = {"head": np.array([1e30, -1e30], np.float32)}
        largest, smallest = integers_of(terms, steps, 1000, 0)["head"].astype(np.int64)
        assert 0.99 * terms.levels <= largest <= terms.levels
        assert -terms.levels <= smallest <= -0.99 * terms.levels
        assert sites * largest < 1 << (bits - 1)


def test_rounding_has_no_bias() -> None:
    terms = Federation(5, 4, sizes={"head": 1}).terms()
    unit = 2.0**-12
    for share in (0.0, 0.25, -0.25, 3.5, -3.5):
        steps = {"head": np.full(1, share * unit, np.float32)}
        found = [integers_of(terms, steps, 1000, seed)["head"][0] for seed in range(400)]
        assert set(found) <= {np.floor(share), np.ceil(share)}
        # Six standard errors of a coin, and the draws are always the same.
        assert abs(np.mean(found) - share) <= 6 * 0.5 / 20


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_is_not_sent(value: float) -> None:
    terms = Federation(5, 4, sizes={"head": 3}).terms(max_weight=1)
    steps = {"head": np.array([1, value, 2]).astype(np.float32)}
    with pytest.raises(SumRefused, match="values"):
        integers_of(terms, steps, 1, 0)


def test_a_step_that_overflows_is_cut_off_like_any_large_one() -> None:
    """A refusal would tell which site has an example of such a step."""
    terms = Federation(5, 4, sizes={"head": 3}).terms(max_weight=1)
    steps = {"head": np.array([0, 3.4e38, -3.4e38], np.float32)}
    # The next float32 below 2^32 / 10.
    most = np.nextafter(np.float32(terms.levels), np.float32(0))
    assert integers_of(terms, steps, 1, 0)["head"].tolist() == [0, int(most), -int(most)]


def test_a_weight_beyond_the_terms_is_not_sent() -> None:
    terms = Federation(5, 4, sizes={"head": 3}).terms()
    for weight in (0, -1, 1001):
        with pytest.raises(SumRefused, match="weight"):
            integers_of(terms, {"head": np.ones(3, np.float32)}, weight, 0)


def test_who_knows_the_seeds_cannot_predict_where_a_site_rounds_up() -> None:
    """A coordinator takes so coarse a scale that steps show where dice are extreme, and sends each site its seed."""
    count, sites = 20_000, 6
    terms = Federation(sites, 4, sizes={"head": count}).terms(
        max_weight=1, blocks={"head": RingBlock(elements=count, exponent=0)}
    )
    steps = np.random.default_rng(1).normal(scale=2.0**-9, size=(sites, count)).astype(np.float32)
    total = sum(integers_of(terms, {"head": own}, 1, seed)["head"] for seed, own in enumerate(steps))
    dice = [np.random.Generator(np.random.SFC64(seed)).random(count, np.float32) for seed in range(sites)]
    extreme = np.abs(np.array(dice) - 0.5) > 0.5 - 2.0**-7
    alone = extreme.sum(0) == 1
    assert alone.sum() > 1000
    shown = np.mean(total != 0)
    # Six standard errors: a sum shows as much there as elsewhere.
    assert abs(np.mean(total[alone] != 0) - shown) <= 6 * np.sqrt(shown / alone.sum())


def test_the_mean_is_within_a_thousandth_of_the_plain_mean() -> None:
    rng = np.random.default_rng(1)
    terms = Federation(5, 4, sizes={"head": 40_000}).terms(max_weight=100)
    steps = rng.normal(scale=0.5, size=(5, 40_000)).astype(np.float32)
    weights = [100, 30, 7, 1, 100]
    sent = [
        integers_of(terms, {"head": own}, weight, seed)["head"]
        for seed, (own, weight) in enumerate(zip(steps, weights, strict=True))
    ]
    factor = terms.max_weight * 2.0 ** terms.blocks["head"].exponent / sum(weights)
    found = sum(own.astype(np.int64) for own in sent) * factor
    expected = np.average(steps.astype(np.float64), axis=0, weights=weights)
    assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)


def test_an_opened_sum_of_nothing_is_zero() -> None:
    step = MeanStep(OpenedSum([], [], 32, 3), 0.5, (3,))
    assert np.array_equal(np.concatenate(list(step.chunks())), np.zeros(3, np.float32))
