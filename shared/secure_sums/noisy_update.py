"""A site's whole update as integers within a norm bound, with its share of the noise.

Client-level privacy inside a secure sum (Kairouz, Liu and Steinke 2021, arXiv 2102.06387, algorithm 1, without its
rotation): the update is clipped over all blocks together, rounded at random to the grid, and gets discrete Gaussian
noise. A refusal would show something of the steps, so an update that is not finite counts as none. Rounding can
lengthen an update; where the integers exceed the bound that the noise is for, they are rounded towards zero instead,
which cannot. The bound therefore holds for every update, and not only with some probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from tessera.shared.privacy.discrete_gaussian import discrete_gaussian
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.secure_sums.masks import RING_DTYPES
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import Array

Steps = Mapping[str, Callable[[], Iterator[Array]]]
"""Of each block, what yields its steps from the version, as float32, chunk by chunk."""

MARGIN = 2.0**-12
"""Part of the clip norm that is left for rounding errors of norms and factors."""


@dataclass(frozen=True)
class NoisyUpdate:
    """An update whose blocks can be read once or more, always rounded in the same way."""

    terms: Terms
    steps: Steps
    seed: int
    """Of the rounding. It need not be secret: the bound holds for each way to round."""
    factor: float
    """From steps to steps of the grid, with the clipping."""
    towards_zero: bool

    @classmethod
    def of(cls, terms: Terms, steps: Steps, seed: int) -> NoisyUpdate:
        """Clip an update to the norm of the terms."""
        norm = math.sqrt(sum(_squares(chunk.astype(np.float64)) for read in steps.values() for chunk in read()))
        if not math.isfinite(norm):
            steps, norm = {name: partial(_zeros, read) for name, read in steps.items()}, 0.0
        limit = terms.clip * (1 - MARGIN)
        unit = 2.0 ** -next(iter(terms.blocks.values())).exponent
        factor = unit if norm * unit <= limit else limit / norm
        found = cls(terms, steps, seed, factor, towards_zero=False)
        if sum(map(_squares, found._all())) > terms.squared_norm_bound:
            found = cls(terms, steps, seed, factor, towards_zero=True)
        return found

    def integers(self, name: str) -> Iterator[Array]:
        """Yield the rounded steps of a block without noise, float64 and flat, chunk by chunk."""
        rng = np.random.Generator(np.random.SFC64([self.seed, sorted(self.steps).index(name)]))
        for chunk in self.steps[name]():
            codes = chunk.astype(np.float64)
            codes *= self.factor
            if self.towards_zero:
                np.trunc(codes, out=codes)
            else:
                codes += rng.random(codes.size)
                np.floor(codes, out=codes)
            yield codes

    def noisy(self, name: str, source: NoiseSource) -> Iterator[Array]:
        """Yield the rounded steps of a block with this site's share of the noise, modulo the ring, chunk by chunk."""
        assert self.terms.noise  # noqa: S101 (for the types)
        for codes in self.integers(name):
            noise = discrete_gaussian(source, self.terms.noise.deviation, codes.size)
            # The cast is modulo 2^bits, as the sum is.
            yield (codes.astype(np.int64) + noise).astype(RING_DTYPES[self.terms.bits])

    def _all(self) -> Iterator[Array]:
        for name in self.steps:
            yield from self.integers(name)


def _zeros(read: Callable[[], Iterator[Array]]) -> Iterator[Array]:
    return map(np.zeros_like, read())


def _squares(values: Array) -> float:
    return float(np.dot(values, values))
