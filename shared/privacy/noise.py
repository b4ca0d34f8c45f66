"""Cryptographic randomness for noise, samples and noisy choices, unpredictable without the key.

The run's seed is unsuitable: others know it, and could remove the noise. So are the generators of numpy and torch,
whose state can be computed from their output, which the noise publishes.
"""

import math
import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from tessera.shared.tensors.lazy import Array

KEY_BYTES = 32

GRID = 1024
"""Lower limit on the noise's standard deviation in steps of the grid: rounding adds less than one ten-millionth to
the noise's variance, and each step contains about 2^50 of the noise's possible values."""


def secret_key() -> bytes:
    """Return a new key from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def grid_of(deviation: float) -> float:
    """Return the unit of released sums with noise of this standard deviation: a power of two, by which floating-point
    numbers divide exactly."""
    return math.ldexp(1.0, math.frexp(deviation / GRID)[1] - 1)


class NoiseSource:
    """Random draws in float64 from the key stream of AES-256 in counter mode. The same key gives the same draws.

    `drawn` words of 8 bytes are skipped: with the `state` of another source, the draws continue where it was.
    """

    def __init__(self, key: bytes, drawn: int = 0) -> None:
        blocks, rest = divmod(drawn, 2)  # a block has 16 bytes
        self._stream = Cipher(AES256(key), CTR(blocks.to_bytes(16, "big"))).encryptor()
        self._stream.update(bytes(8 * rest))
        self._key = key
        self._drawn = drawn

    @property
    def state(self) -> tuple[bytes, int]:
        """The key and the number of words drawn so far: as secret as the noise."""
        return self._key, self._drawn

    def seed(self) -> int:
        """Draw a seed for other generators, below 2^63."""
        return int(self.words(1)[0] >> np.uint64(1))

    def sample(self, examples: int, rate: float) -> Array:
        """Draw a Poisson sample: the indices of its examples, int64 [sampled]."""
        if rate >= 1:
            return np.arange(examples)
        return np.flatnonzero(self._uniform(examples) < rate)

    def normal(self, count: int) -> Array:
        """Draw standard normals, float64 [count], by the Box-Muller method.

        The radius uses all 64 bits of a word, so that the tails reach 9.4 instead of 8.6.
        """
        pairs = -(-count // 2)
        radius = np.sqrt(-2 * np.log((self.words(pairs) + 1.0) * 2.0**-64))  # a logarithm of (0, 1]
        angle = 2 * math.pi * self._uniform(pairs)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def gumbel(self, count: int) -> Array:
        """Draw from the standard Gumbel distribution, float64 [count]."""
        # Fine steps near 0 give the upper tail; at 1 the result would be minus infinity.
        share = np.minimum((self.words(count) + 0.5) * 2.0**-64, 1 - 2.0**-53)
        gumbel: Array = -np.log(-np.log1p(-share))
        return gumbel

    def _uniform(self, count: int) -> Array:
        """Draw multiples of 2^-53 in [0, 1), float64 [count]."""
        uniform: Array = (self.words(count) >> np.uint64(11)) * 2.0**-53
        return uniform

    def words(self, count: int) -> Array:
        """Return the next words of the key stream, uint64 [count]."""
        self._drawn += count
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8")
