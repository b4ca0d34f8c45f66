"""Exact samples of the discrete Gaussian distribution, from a secret key stream.

An integer y has a probability proportional to exp(-y^2 / (2 sigma^2)). The sampler is that of Canonne, Kamath and
Steinke 2020 (arXiv 2004.00010, algorithms 1 to 3) on whole arrays. It compares integers alone, so no rounding of a
floating-point number changes a probability.
"""

from __future__ import annotations

import numpy as np

from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.tensors.lazy import Array

MAX_DEVIATION = 1 << 30
"""The largest standard deviation: twice its square is a denominator within 64 bits."""

SPARE = 2.25
"""Candidates for each sample: slightly fewer than half are accepted."""


def discrete_gaussian(source: NoiseSource, deviation: int, count: int) -> Array:
    """Draw integers with the parameter sigma = `deviation`, int64 [count]. Raises ValueError for one out of range."""
    if not 1 <= deviation <= MAX_DEVIATION:
        raise ValueError(f"a standard deviation of {deviation} is not within 1 and {MAX_DEVIATION}")
    found = [np.empty(0, np.int64)]
    missing = count
    while missing > 0:
        found.append(_accepted(source, deviation, int(SPARE * missing) + 8)[:missing])
        missing -= found[-1].size
    return np.concatenate(found)


def _accepted(source: NoiseSource, deviation: int, candidates: int) -> Array:
    """Return the candidates that the sampler accepts, in their order."""
    # Algorithm 2 with t = sigma: magnitudes of a discrete Laplace distribution, offset + sigma times.
    offset = _below(source, deviation, candidates)
    offset = offset[_heads(source, offset, deviation)]
    times = _successes(source, offset.size)
    magnitude = offset.astype(np.int64) + deviation * times
    negative = _below(source, 2, magnitude.size) == 1
    once = ~(negative & (magnitude == 0))
    magnitude, negative = magnitude[once], negative[once]
    # Algorithm 3 accepts with probability exp(-(|y| - sigma)^2 / (2 sigma^2)). With |y| - sigma = whole sigma + rest,
    # that is one coin of exp(-1/2) for each of whole^2, one of exp(-rest/sigma) for each of whole, and one of
    # exp(-rest^2 / (2 sigma^2)): exponents within 0 and 1, as algorithm 1 needs them.
    distance = np.abs(magnitude - deviation)
    whole, rest = distance // deviation, (distance % deviation).astype(np.uint64)
    kept = _all_heads(source, np.ones(whole.size, np.uint64), 2, whole * whole)
    kept &= _all_heads(source, rest, deviation, np.where(kept, whole, 0))
    kept &= _all_heads(source, rest * rest, 2 * deviation * deviation, kept.astype(np.int64))
    accepted: Array = np.where(negative, -magnitude, magnitude)[kept]
    return accepted


def _all_heads(source: NoiseSource, numerator: Array, denominator: int, tosses: Array) -> Array:
    """Toss a coin of exp(-numerator/denominator) so often; return True if all were heads, bool [numerator]."""
    heads, tossed = np.ones(numerator.size, np.bool_), 0
    while (due := np.flatnonzero(heads & (tosses > tossed))).size:
        heads[due] = _heads(source, numerator[due], denominator)
        tossed += 1
    return heads


def _successes(source: NoiseSource, count: int) -> Array:
    """Return the number of heads before the first tails of coins of exp(-1), int64 [count]."""
    found = np.zeros(count, np.int64)
    going = np.arange(count)
    while going.size:
        going = going[_heads(source, np.ones(going.size, np.uint64), 1)]
        found[going] += 1
    return found


def _heads(source: NoiseSource, numerator: Array, denominator: int) -> Array:
    """Toss a coin of exp(-numerator/denominator) for each numerator, at most the denominator (algorithm 1).

    The number of successes before the first failure, of which the k-th has the probability numerator/(k denominator),
    is even with that probability.
    """
    heads = np.ones(numerator.size, np.bool_)
    going, k = np.arange(numerator.size), 1
    while going.size:
        if k > 1:
            going = going[_below(source, k, going.size) == 0]
        going = going[_below(source, denominator, going.size) < numerator[going]]
        heads[going] ^= True
        k += 1
    return heads


def _below(source: NoiseSource, bound: int, count: int) -> Array:
    """Draw integers below a bound, uint64 [count]."""
    bits = (bound - 1).bit_length()
    if not bits:
        return np.zeros(count, np.uint64)
    values = source.words(count) >> np.uint64(64 - bits)
    while (over := np.flatnonzero(values >= bound)).size:
        values[over] = source.words(over.size) >> np.uint64(64 - bits)
    return values
