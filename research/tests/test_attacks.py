"""The canary audit holds the worker's privacy to its claim; the other attacks find what they are known to find."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from attacks import closed_form, spans
from attacks.__main__ import CHOSEN_STD, CI_CONFIDENCE, FAST, main, strongest_audit
from attacks.canaries import (
    DELTA,
    Audit,
    audit,
    by_rows,
    chance,
    lower_bound,
    noise_of,
    one_word_canaries,
    planned_guesses,
)
from attacks.membership import halves, likelihood_ratios
from attacks.site import FULL, HEAD, NORMS, QUERY_KEY, VALUE, WORDS, Release, release
from attacks.subjects import text_model, texts
from common.arrays import Array
from tessera.shared.run_settings import Privacy
from tessera.worker.data.dataset import Dataset

CANARIES = 2000
SEED = 0

# ---------------------------------------------------------------- the statistics of the audit


def test_without_delta_the_bound_is_that_of_a_binomial_test() -> None:
    # All 100 guesses are right with a probability of q^100, which is 0.05 at q = 0.9705: epsilon = log(q / (1 - q)).
    best = 0.05**0.01
    assert lower_bound(100, 100, 100, 0.0, 0.95) == pytest.approx(math.log(best / (1 - best)), abs=1e-3)
    assert chance(100, 80, 70, 1.0, 0.0) == pytest.approx(binom.sf(69, 80, 1 / (1 + math.exp(-1))))


def test_a_guess_of_every_coin_bounds_nothing() -> None:
    assert lower_bound(1000, 1000, 500, DELTA, 0.95) == 0.0


def test_a_larger_delta_and_more_confidence_lower_the_bound() -> None:
    bounds = [lower_bound(2000, 100, 98, delta, 0.95) for delta in (0.0, 1e-6, 1e-4)]
    assert bounds == sorted(bounds, reverse=True)
    assert lower_bound(2000, 100, 98, 1e-6, 0.999) < bounds[1]


def test_the_bound_of_randomized_response_is_seldom_above_its_epsilon() -> None:
    # Each coin is reported right with probability e / (1 + e): exactly (1, 0)-differential privacy.
    right = np.random.default_rng(0).binomial(1000, math.e / (1 + math.e), 400)
    above = sum(chance(1000, 1000, int(count), 1.0, 0.0) < 0.05 for count in right)
    # At most 5 % of 400 are expected; 35 or more would have a chance of one in a thousand.
    assert above < 35


# ---------------------------------------------------------------- the audit of the worker


@pytest.mark.parametrize(
    ("claim", "least"), [(8.0, 2.0), pytest.param(1.0, 0.0, marks=pytest.mark.long), (None, 4.0)]
)
def test_one_update_shows_no_more_than_its_claim_and_the_auditor_is_not_blind(
    claim: float | None, least: float
) -> None:
    found = strongest_audit(CANARIES, claim, SEED, CI_CONFIDENCE).bound(CI_CONFIDENCE)
    assert least <= found <= (claim or math.inf)


def test_an_auditor_that_looks_at_the_wrong_rows_finds_nothing() -> None:
    version, data = one_word_canaries(200, SEED)

    def blind(released: Release, canaries: Dataset, privacy: Privacy | None) -> Array:
        return np.roll(by_rows(released, canaries, privacy), 1)

    bounds = [audit(version, data, WORDS, None, 200, SEED, look, FAST).bound(0.95) for look in (by_rows, blind)]
    assert bounds[0] > 3.0
    assert bounds[1] < 0.5


def test_an_example_that_is_out_moves_nothing() -> None:
    version, data = one_word_canaries(20, SEED)
    data.tensors["labels"][:10] = -100
    for privacy in (None, Privacy(epsilon=8.0, delta=DELTA, clip_norm=1e-3)):
        (step,) = release(version, data, WORDS, privacy=privacy, training=FAST).steps.values()
        moved = np.linalg.norm(step[1:], axis=1)
        assert (moved[10:] > 0).all()
        # Without privacy nothing moves these rows; with it they have noise alone.
        assert privacy or not moved[:10].any()


def test_the_number_of_guesses_follows_from_the_noise_alone() -> None:
    noise = noise_of(Privacy(epsilon=8.0, delta=DELTA, clip_norm=1.0))
    assert 0 < planned_guesses(CANARIES, noise, DELTA, CI_CONFIDENCE) < CANARIES
    assert planned_guesses(CANARIES, 0.0, DELTA, CI_CONFIDENCE) == CANARIES
    assert Audit(100, 10, 10, DELTA).bound(0.95) > 0


# ---------------------------------------------------------------- the other attacks


def test_words_are_read_off_the_rows_that_moved() -> None:
    version, data = text_model(0), texts(0, 8)
    assert closed_form.words(release(version, data, FULL), data) == 1.0
    assert closed_form.words(release(version, data, HEAD), data) is None


def test_value_or_query_and_key_blocks_alone_give_each_word_in_its_place() -> None:
    version, data = text_model(0, initializer_range=CHOSEN_STD), texts(0, 1)
    for scope in (VALUE, QUERY_KEY):
        found = spans.words_in_place(release(version, data, scope, training=FAST), data)
        assert found == 1.0
    assert spans.words_in_place(release(version, data, NORMS, training=FAST), data) is None


def test_a_crafted_head_counts_labels_and_singles_out_an_example() -> None:
    data = texts(0, 32, (0.6, 0.2, 0.2, 0.0))
    data.tensors["labels"][5] = closed_form.RARE
    counted = release(closed_form.for_label_counts(text_model(0)), data, HEAD)
    assert closed_form.label_counts(counted, data) == 1.0
    singled_out = release(closed_form.for_one_example(text_model(0)), data, HEAD)
    cosine = closed_form.rare_feature(singled_out, data)
    assert cosine is not None
    assert cosine > 0.99


def test_likelihood_ratios_are_positive_for_members_of_models_that_memorize() -> None:
    members = halves(40, 8, seed=0)
    measured = members * 2.0 + np.random.default_rng(0).normal(scale=0.1, size=members.shape)
    ratios = likelihood_ratios(measured, members, 3)
    seen = members.any(axis=0) & ~members.all(axis=0)
    assert ((ratios > 0) == members[3])[seen].mean() > 0.9


@pytest.mark.long
def test_the_short_form_prints_and_writes_its_tables(tmp_path: Path) -> None:
    main(["--quick", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "attacks.json").read_text())["rows"]
    full = {row["attack"]: row["figure"] for row in rows if row.get("sent") == "full" and row["epsilon"] == "none"}
    assert full["words of 8 texts"] == 1.0
    assert {row["sent"] for row in rows if "sent" in row} == {"full", "value", "prompts"}
    assert {row["epsilon"] for row in rows} == {"none", 8.0}
