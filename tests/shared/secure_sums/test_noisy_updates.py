"""Client-level privacy in secure sums: each update within its norm, and enough noise whoever is away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.shared.privacy import noise_shares
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.messages import RingBlock, Terms
from tessera.shared.secure_sums.noisy_update import NoisyUpdate
from tessera.shared.secure_sums.roster import check_terms
from tests.support.secure_sums import Federation, Steps, integers_of

WIDE = {"head": 3000, "layer.0.value": 500}
CLIP = 0.5


def federation(sites: int = 6) -> Federation:
    return Federation(sites, 4, quorum=5, sizes=WIDE)


def full(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(size, value, np.float32) for name, size in WIDE.items()}


def rounded(terms: Terms, steps: dict[str, np.ndarray], seed: int = 0) -> np.ndarray:
    """The integers of an update before its noise, of all blocks together."""
    update = NoisyUpdate.of(terms, {name: Steps(values).steps for name, values in steps.items()}, seed)
    return np.concatenate([chunk for name in sorted(steps) for chunk in update.integers(name)])


def keys(count: int) -> list[bytes]:
    return [bytes([n]) * 32 for n in range(count)]


# ---------------------------------------------------------------- the norm


@pytest.mark.parametrize("value", [0.01, 1.0, 1e6, 1e30, 3e38])
def test_an_update_over_the_clip_norm_is_shortened_over_all_its_blocks_together(value: float) -> None:
    terms = federation().noisy_terms()
    found = rounded(terms, full(value))
    length = np.linalg.norm(found)
    assert length**2 <= terms.squared_norm_bound
    assert length == pytest.approx(terms.clip, rel=1e-3)
    assert np.ptp(found) <= 1


def test_an_update_within_the_clip_norm_stays_as_it_is() -> None:
    terms = federation().noisy_terms()
    rng = np.random.default_rng(1)
    steps = {name: rng.normal(scale=0.003, size=size).astype(np.float32) for name, size in WIDE.items()}
    unit = CLIP / terms.clip
    exact = np.concatenate([steps[name] for name in sorted(steps)]) / unit
    assert np.abs(rounded(terms, steps) - exact).max() < 1 + 1e-3


def test_an_update_of_zero_is_zero_before_the_noise() -> None:
    assert not rounded(federation().noisy_terms(), full(0.0)).any()
    assert not rounded(federation().noisy_terms(), full(-0.0)).any()


def test_an_update_that_rounding_makes_too_long_is_rounded_towards_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = federation()
    # A grid so coarse that rounding adds nearly as much as there is, and a bound that a third of roundings exceed: of
    # 3,500 values of 0.54 steps each, 1,893 become 1 on average, with a deviation of 29. The bound is 1,908.
    blocks = {name: RingBlock(elements=size, exponent=-6) for name, size in WIDE.items()}
    noise = fed.noisy_terms().noise
    assert noise is not None
    terms = fed.terms(max_weight=1, blocks=blocks, noise=noise.model_copy(update={"deviation": 100}))
    monkeypatch.setattr(noise_shares, "OVER", 0.99)
    ways = [rounded(terms, full(1.0), seed) for seed in range(40)]
    towards_zero = [way for way in ways if not way.any()]
    assert 0 < len(towards_zero) < len(ways)
    assert all(np.sum(way**2) <= terms.squared_norm_bound for way in ways)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_with_a_step_that_is_not_finite_counts_as_none(value: float) -> None:
    steps, terms = full(0.1), federation().noisy_terms()
    steps["head"][7] = value
    assert not rounded(terms, steps).any()
    sent, nothing = (integers_of(terms, each, 1, 0, bytes(32)) for each in (steps, full(0.0)))
    assert all(np.array_equal(sent[name], nothing[name]) for name in nothing)


# ---------------------------------------------------------------- the noise


def test_an_update_never_leaves_without_noise() -> None:
    terms = federation().noisy_terms()
    with pytest.raises(SumRefused, match="noise"):
        integers_of(terms, full(0.0), 1, 0)
    assert terms.noise is not None
    noise = integers_of(terms, full(0.0), 1, 0, bytes(32))["head"]
    assert noise.std() == pytest.approx(terms.noise.deviation, rel=0.1)


def test_two_updates_with_two_keys_share_no_noise() -> None:
    terms = federation().noisy_terms()
    one, other = (integers_of(terms, full(0.0), 1, 0, key)["head"].astype(float) for key in keys(2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
    again = integers_of(terms, full(0.0), 1, 0, keys(1)[0])["head"]
    assert np.array_equal(again, one)


@pytest.mark.parametrize("away", [0, 1])
def test_an_opened_sum_has_the_claimed_noise_with_a_site_and_a_helper_away(away: int) -> None:
    fed = federation()
    terms = fed.noisy_terms()
    live = fed.names[: 6 - away]
    sent = [fed.send(terms, site, full(0.0), noise_key=key) for site, key in zip(live, keys(len(live)), strict=True)]
    # One helper of four is away throughout.
    agreed = fed.agreements(terms, sent, ["site-00", "site-02", "site-03"])
    files = fed.mask_sums(terms, sent, agreed, ["site-00", "site-02"])
    opened = fed.opened(terms, sent, files)
    plain = [integers_of(terms, full(0.0), 1, 0, key) for key in keys(len(live))]
    for name, total in opened.items():
        assert np.array_equal(total, sum(own[name].astype(np.int64) for own in plain))
    noise = terms.noise
    assert noise is not None
    claimed = noise.honest_sites * noise.deviation**2
    found = np.concatenate(list(opened.values())).astype(float).var()
    assert found > 1.1 * claimed
    assert found == pytest.approx(len(live) * noise.deviation**2, rel=0.15)


def test_what_is_left_after_the_colluders_take_off_their_noise_is_the_claim() -> None:
    fed = federation()
    terms = fed.noisy_terms()
    assert terms.noise is not None
    shares = [integers_of(terms, full(0.0), 1, 0, key)["head"].astype(float) for key in keys(5)]
    left = sum(shares) - shares[4]
    assert left.var() == pytest.approx(terms.noise.honest_sites * terms.noise.deviation**2, rel=0.15)
    assert terms.noise.honest_sites == 4


def test_a_sum_of_noisy_updates_does_not_wrap_around() -> None:
    fed = federation(6)
    terms = fed.noisy_terms()
    assert terms.noise is not None
    steps = {name: np.zeros(size, np.float32) for name, size in WIDE.items()}
    steps["head"][0] = 1e9
    total = sum(integers_of(terms, steps, 1, 0, key)["head"].astype(np.int64) for key in keys(6))
    assert total[0] == pytest.approx(6 * terms.clip, abs=6 * 5 * terms.noise.deviation)
    assert terms.max_senders * (terms.clip + 16 * terms.noise.deviation) < 1 << 31


def test_the_noise_of_the_largest_sums_comes_from_the_same_stream_on_every_read() -> None:
    terms = federation().noisy_terms()
    update = NoisyUpdate.of(terms, {name: Steps(values).steps for name, values in full(0.1).items()}, 3)
    first, again = (np.concatenate(list(update.noisy("head", NoiseSource(bytes(32))))) for _ in range(2))
    assert np.array_equal(first, again)


# ---------------------------------------------------------------- terms that no party takes


def test_terms_whose_noise_is_less_than_they_claim_are_refused_by_sites_and_helpers() -> None:
    fed = federation()
    terms = fed.noisy_terms()
    check_terms(terms, fed.roster, 5)
    assert terms.noise is not None
    assert 0.99 * terms.noise.epsilon < terms.epsilon <= terms.noise.epsilon
    for change in (
        {"deviation": terms.noise.deviation - max(1, terms.noise.deviation // 1000)},
        {"epsilon": terms.noise.epsilon * 0.99},
        {"rounds": 5},
        {"clip_norm": 0.51},
        {"delta": 1e-6},
        {"honest_sites": 3},
    ):
        less = fed.noisy_terms(noise=terms.noise.model_copy(update=change))
        with pytest.raises(SumRefused, match="noise: the noise of"):
            check_terms(less, fed.roster, 5)
        sent = [fed.send(less, site, full(0.0)).envelope for site in fed.names]
        with pytest.raises(SumRefused, match="noise: the noise of"):
            fed.member("site-00").agree(less, sent)


def test_updates_with_other_noise_terms_are_never_summed() -> None:
    fed = federation()
    terms, less = fed.noisy_terms(), fed.noisy_terms(epsilon=9.0)
    sent = [fed.send(less if n else terms, site, full(0.0)).envelope for n, site in enumerate(fed.names)]
    with pytest.raises(SumRefused, match="terms-differ"):
        fed.member("site-00").agree(terms, sent)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"number": 5}, "this is round 5"),
        ({"quorum": 3, "honest_sites": 4}, "cannot come from 3 sites"),
        ({"max_weight": 2}, "all sites weigh 1"),
        ({"exponents": (-20, -21)}, "all blocks have one scale"),
        ({"bits": 16}, "no room in 16 bits"),
        ({"max_senders": 1000}, "no room in 32 bits"),
    ],
)
def test_terms_with_noise_that_cannot_be_are_no_terms(changed: dict[str, Any], why: str) -> None:
    fed = federation()
    given = dict(changed)
    if exponents := given.pop("exponents", None):
        blocks = zip(WIDE.items(), exponents, strict=True)
        given["blocks"] = {name: RingBlock(elements=size, exponent=own) for (name, size), own in blocks}
    with pytest.raises(ValidationError, match=why):
        fed.noisy_terms(**given)


def test_terms_with_a_grid_on_which_a_norm_is_not_exact_are_no_terms() -> None:
    fed = federation()
    noise = fed.noisy_terms().noise
    assert noise is not None
    blocks = {name: RingBlock(elements=size, exponent=-28) for name, size in WIDE.items()}
    with pytest.raises(ValidationError, match="the grid is too fine"):
        fed.noisy_terms(blocks=blocks, noise=noise.model_copy(update={"deviation": 1000}))
