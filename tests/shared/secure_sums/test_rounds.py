"""Secure sums of whole rounds are exact where sites and helpers are away or are asked again.

Helpers that are killed: tests/worker/state/test_killed_helpers.py.
"""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest

from tessera.shared.secure_sums.messages import share_out
from tests.support.secure_sums import SIZES, Federation, integers_of, steps_of
from tests.support.variants import variants


def _round(seed: int) -> int:
    """Run a round with helpers that are asked again at each step. Return how many blocks were opened."""
    rng = Random(seed)
    helpers = rng.choice((3, 4, 4, 7))
    federation = Federation(rng.randint(max(helpers, 5), 14), helpers, rng.randint(3, 5), rng.choice((16, 32)))
    terms = federation.terms()
    live = sorted(rng.sample(federation.names, max(federation.quorum, federation.sites * 2 // 3)))
    plain, sent = [], []
    for site in live:
        steps = steps_of(rng, blocks=rng.sample(sorted(SIZES), rng.randint(1, len(SIZES))))
        weight = rng.randint(1, 1000)
        plain.append(integers_of(terms, steps, weight, seed))
        # A lost answer: sent once more, under new masks.
        federation.send(terms, site, steps, weight, seed)
        sent.append(federation.send(terms, site, steps, weight, seed))
    counts = {name: sum(name in own for own in plain) for name in SIZES}
    if max(counts.values()) < federation.quorum:
        return 0
    rng.shuffle(sent)
    # All but the tolerated number answer, some twice: they forgot that they did.
    names = list(federation.sealing)
    answering = rng.sample(names, terms.signatures)
    agreed = federation.agreements(terms, sent, answering)
    assert federation.agreements(terms, rng.sample(sent, len(sent)), answering) == agreed
    opening = rng.sample(names, terms.tolerance + 1)
    files = federation.mask_sums(terms, sent, agreed, opening)
    assert federation.mask_sums(terms, sent, agreed, opening) == files
    found = federation.opened(terms, sent, files)
    assert set(found) == {name for name, count in counts.items() if count >= federation.quorum}
    for name, total in found.items():
        expected = sum(own[name].astype(np.int64) for own in plain if name in own)
        assert np.array_equal(total, expected), (seed, name)
    return len(found)


@pytest.mark.parametrize("start", variants(range(0, 30, 10), {0}))
def test_no_bit_is_wrong_in_any_round(start: int) -> None:
    assert sum(_round(seed) for seed in range(start, start + 10)) > 10


@pytest.mark.long
@pytest.mark.parametrize("start", range(1000, 11_000, 1000))
def test_no_bit_is_wrong_in_ten_thousand_rounds(start: int) -> None:
    assert sum(_round(seed) for seed in range(start, start + 1000)) > 1000


def test_each_group_of_helpers_within_the_tolerance_lacks_a_seed_and_each_larger_one_has_all() -> None:
    for helpers in (3, 4, 5, 6, 7):
        terms = Federation(7, helpers).terms()
        for size in range(1, helpers + 1):
            for group in combinations(range(helpers), size):
                known = set().union(*(terms.seeds_of(helper) for helper in group))
                assert (len(known) == len(terms.seeds)) == (size > terms.tolerance)


def test_any_two_groups_that_sign_share_more_helpers_than_may_cheat() -> None:
    for helpers in (3, 4, 5, 6, 7):
        terms = Federation(7, helpers).terms()
        assert 2 * terms.signatures - helpers > terms.tolerance
        assert terms.signatures <= helpers


def test_each_seed_is_summed_once_by_a_helper_that_has_it() -> None:
    terms = Federation(7, 7).terms()
    shares = share_out(7, [1, 4, 6])
    assert sorted(seed for own in shares.values() for seed in own) == list(range(21))
    assert all(set(own) <= set(terms.seeds_of(helper)) for helper, own in shares.items())


def test_a_masked_update_shows_nothing_of_the_values() -> None:
    federation = Federation(5, 4, sizes={"wide": 1 << 16})
    terms = federation.terms()
    steps = {"wide": np.zeros(1 << 16, np.float32)}
    files = [federation.send(terms, "site-01", steps).file[-(4 << 16) :] for _ in range(2)]
    first, second = (np.frombuffer(file, np.uint8) for file in files)
    # 1,024 of each byte are expected: seven standard deviations are 224.
    for counts in (np.bincount(first, minlength=256), np.bincount(first ^ second, minlength=256)):
        assert abs(counts - 1024).max() < 224


def test_an_envelope_is_small() -> None:
    blocks = {f"model.encoder.layer.{n:03}.attention.value.weight": 4 for n in range(300)}
    for helpers, limit in ((4, 2_000), (7, 6_000)):
        federation = Federation(7, helpers, sizes=blocks)
        steps = {name: np.ones(4, np.float32) for name in blocks}
        envelope = federation.send(federation.terms(), "site-01", steps).envelope
        assert len(envelope.model_dump_json()) < limit
        assert envelope.block_names(federation.terms()) == tuple(sorted(blocks))
