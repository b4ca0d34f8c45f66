"""The generator that noise and samples are drawn from: its distributions, and what it does not depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from scipy.stats import gumbel_r, kstest

from tessera.shared.privacy.noise import NoiseSource, secret_key

KEY = bytes(range(32))
DRAWS = 200_000


def test_normals_are_normal() -> None:
    drawn = NoiseSource(KEY).normal(DRAWS)
    assert drawn.dtype == np.float64
    assert kstest(drawn, "norm").pvalue > 0.01
    # Standard errors are 0.0022 for the mean, 0.0016 for the deviation and 0.011 for the excess kurtosis.
    assert abs(drawn.mean()) < 0.007
    assert abs(drawn.std() - 1) < 0.005
    assert abs(((drawn - drawn.mean()) ** 4).mean() / drawn.var() ** 2 - 3) < 0.035


def test_the_two_normals_of_a_pair_and_successive_draws_are_not_correlated() -> None:
    dice = NoiseSource(KEY)
    first, second = dice.normal(DRAWS), dice.normal(DRAWS)
    pairs = [(first, second), (first[: DRAWS // 2], first[DRAWS // 2 :]), (first[:-1], first[1:])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.01 for a, b in pairs)
    # Nor are their sizes, as they would be if a pair shared its radius alone.
    assert all(abs(np.corrcoef(a**2, b**2)[0, 1]) < 0.01 for a, b in pairs)


def test_gumbels_follow_their_distribution() -> None:
    assert kstest(NoiseSource(KEY).gumbel(DRAWS), gumbel_r.cdf).pvalue > 0.01


def test_the_bits_are_the_key_stream_of_aes_in_counter_mode() -> None:
    encrypt = Cipher(AES256(KEY), ECB()).encryptor().update  # noqa: S305  (of one block, as counter mode uses it)
    blocks = b"".join(encrypt(counter.to_bytes(16, "big")) for counter in range(3))
    dice = NoiseSource(KEY)
    assert [dice.seed() for _ in range(6)] == [int(word) >> 1 for word in np.frombuffer(blocks, "<u8")]


@pytest.mark.parametrize("word", [0, 1, (1 << 64) - 1])
def test_the_extreme_words_give_numbers(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    dice = NoiseSource(KEY)
    monkeypatch.setattr(dice, "words", lambda count: np.full(count, word, np.uint64))
    assert np.isfinite(dice.normal(4)).all()
    assert np.isfinite(dice.gumbel(2)).all()
    # The smallest word gives the farthest normal: the root of 2 ln 2^64.
    assert np.abs(dice.normal(2)).max() <= math.sqrt(2 * 64 * math.log(2)) + 1e-12
    assert len(dice.sample(4, 0.5)) == (4 if word < 2 else 0)


def test_what_is_drawn_does_not_depend_on_numpys_global_state_and_leaves_it_alone() -> None:
    np.random.seed(1)  # noqa: NPY002  (the global state is what this is about)
    first = NoiseSource(KEY).normal(16)
    np.random.seed(2)  # noqa: NPY002
    state = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    assert np.array_equal(NoiseSource(KEY).normal(16), first)
    assert np.array_equal(np.random.get_state()[1], state)  # type: ignore[index]  # noqa: NPY002


def test_a_key_has_256_bits_from_the_system() -> None:
    assert len(secret_key()) == 32
    assert secret_key() != secret_key()
    with pytest.raises(ValueError, match="key size"):
        NoiseSource(bytes(16))


@pytest.mark.parametrize("drawn", [0, 1, 6, 9])
def test_a_source_continues_where_another_was(drawn: int) -> None:
    whole, first = NoiseSource(KEY), NoiseSource(KEY)
    # A seed takes one word, and a block of the cipher has two.
    expected = [whole.seed() for _ in range(drawn + 5)][drawn:]
    for _ in range(drawn):
        first.seed()
    second = NoiseSource(*first.state)
    assert [second.seed() for _ in range(5)] == expected
