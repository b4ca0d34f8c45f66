"""Robust rules: what a block's next value is when some of the workers that sent it may send anything at all.

A run chooses one beside its method and its server optimizer, as in `robust = {"rule": "median", "attackers": 1}`. It
stands in the place of the weighted mean, block by block over those who sent the block: absent is 'no change' and
never zero. Workers count alike, since a weight that a worker states itself would be a way to be many.

`attackers` is f, the number of malicious workers that a round must tolerate. A block that fewer than `least` workers
sent stays as it is, so that f colluders cannot determine a block that no other worker sends.

Two kinds. `OrderStatistic` rules sort each element over the senders. `ByGram` rules take all inner products of the
senders' steps in one pass, work out weights on that small matrix, and add the steps up in a second; iterations cost
nothing. Neither uses BLAS, so that the bits are the same on every machine.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from tessera.shared.aggregation.mean import Normalization
from tessera.shared.schema import Compatibility, Value
from tessera.shared.tensors.lazy import (
    PIECE,
    Array,
    DerivedTensor,
    SteppedTensor,
    Tensor,
    WeightedSum,
    lockstep,
    weighted_steps,
)

FEW_SENDERS = "blocks_with_few_senders"
"""The name of a version's number: how many blocks were sent, but by too few for the rule."""


class RobustRule(Value):
    """One way to make a step of many."""

    # It merges steps, each from the version of its own, and divided by its local work.
    buffered: ClassVar[Compatibility] = Compatibility()
    """Says whether it takes steps from different versions."""
    unequal_steps: ClassVar[Compatibility] = Compatibility()
    """Says whether it takes steps of unequal local work."""

    @property
    def neutral(self) -> bool:
        """Return True if the rule is the weighted mean."""
        return False

    @property
    def least(self) -> int:
        """Senders of a block without which the rule promises nothing."""
        return 1

    @abstractmethod
    def step(self, base: Tensor, senders: Sequence[Tensor], share: float) -> DerivedTensor:
        """Return the tensor to subtract from `base`: the rule's step times `share`, with the sign turned."""


class Mean(RobustRule):
    """The mean by examples. Breakdown point 0: a single worker moves it anywhere."""

    rule: Literal["mean"] = "mean"

    @property
    def neutral(self) -> bool:
        return True

    def step(self, base: Tensor, senders: Sequence[Tensor], share: float) -> DerivedTensor:
        return weighted_steps(base, [(-share / len(senders), sent) for sent in senders])


class Guard(RobustRule):
    """A rule that tolerates attackers."""

    attackers: PositiveInt = Field(default=1, le=1000, description="malicious workers that a round must tolerate")

    @property
    def least(self) -> int:
        return 2 * self.attackers + 1


# ---------------------------------------------------------------- element by element


class OrderStatistic(Guard):
    """A mean of each element without its `cut` smallest and `cut` largest values."""

    @abstractmethod
    def cut(self, senders: int) -> int: ...

    def step(self, base: Tensor, senders: Sequence[Tensor], share: float) -> DerivedTensor:
        steps = tuple(weighted_steps(base, [(-1.0, sent)]) for sent in senders)
        return Middle(base.shape, steps[0].dtype, steps, self.cut(len(steps)), share)


class Median(OrderStatistic):
    """The median of each element (Yin et al. 2018, arXiv 1803.01498, definition 1).

    Breakdown point 1/2: with less than half hostile, each element lies between two that honest workers sent.
    """

    rule: Literal["median"] = "median"

    def cut(self, senders: int) -> int:
        return (senders - 1) // 2


class TrimmedMean(OrderStatistic):
    """The mean of each element without the `attackers` smallest and largest (Yin et al. 2018, definition 2).

    Breakdown point attackers / senders, less than 1/2: one more hostile worker than that moves it anywhere.
    """

    rule: Literal["trimmed-mean"] = "trimmed-mean"

    def cut(self, senders: int) -> int:
        return self.attackers


@dataclass(frozen=True)
class Middle(DerivedTensor):
    """The mean of its sources, element by element, without the `cut` smallest and largest, times `share`.

    NaN counts as the largest of all.
    """

    cut: int
    share: float

    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        senders = list(parts)
        kept = len(senders) - 2 * self.cut
        factor = out.dtype.type(self.share / kept)
        for start in range(0, len(out), PIECE):
            total = out[start : start + PIECE]
            # [senders][elements], each element in rising order over the senders: the sum's order is the values' own.
            rows = _sorted([part[start : start + PIECE].copy() for part in senders])
            total.fill(0)
            for row in rows[self.cut : self.cut + kept]:
                np.add(total, row, out=total)
            np.multiply(total, factor, out=total)


def _sorted(rows: list[Array]) -> list[Array]:
    """Return the rows sorted element by element, overwriting them: several times as fast as to sort along that
    axis."""
    spare = np.empty_like(rows[0])
    with np.errstate(invalid="ignore"):
        for low, high in _network(len(rows)):
            one, other = rows[low], rows[high]
            np.fmin(one, other, out=spare)
            np.maximum(one, other, out=other)
            rows[low], spare = spare, one
    return rows


@lru_cache
def _network(count: int) -> list[tuple[int, int]]:
    """Return pairs to be put in order, one after the other, that sort `count` rows: Batcher's odd-even merge sort
    (1968)."""
    pairs: list[tuple[int, int]] = []
    size = 1
    while size < count:
        stride = size
        while stride:
            for first in range(stride % size, count - stride, 2 * stride):
                lows = range(first, min(first + stride, count - stride))
                pairs += [(low, low + stride) for low in lows if low // (2 * size) == (low + stride) // (2 * size)]
            stride //= 2
        size *= 2
    return pairs


# ---------------------------------------------------------------- from inner products


class ByGram(Guard):
    """A weighted sum of the steps, with weights that follow from their inner products."""

    @abstractmethod
    def weights(self, gram: Array, attackers: int) -> Array:
        """Return the weight of each step, float64 [senders], from their inner products, float64 [senders,
        senders]."""

    def step(self, base: Tensor, senders: Sequence[Tensor], share: float) -> DerivedTensor:
        plain = weighted_steps(base, [(-1.0, sent) for sent in senders])
        return RobustSum(plain.shape, plain.dtype, plain.sources, plain.weights, self, share)


class CentredClipping(ByGram):
    """Norm clipping with a moving centre: v = v + mean(clip(step - v)), from v = 0 (Karimireddy et al. 2021, arXiv
    2012.10333, equation 8, within one round). With `iterations = 1` it is plain norm clipping.

    The radius is the senders' median distance from v unless `norm` gives it. Breakdown point 1/2 with the median, and
    none with a `norm`: v then never moves by more than norm * iterations. It bounds rather than removes: a hostile
    worker pulls by radius / senders an iteration wherever it likes. The paper proves its rate for up to a tenth.
    """

    rule: Literal["clip"] = "clip"
    norm: PositiveFloat | None = Field(
        default=None, description="the radius, an l2 norm per block; the median distance if left out"
    )
    iterations: PositiveInt = Field(default=10, le=100, description="number of times that the centre moves")

    def weights(self, gram: Array, attackers: int) -> Array:
        count = len(gram)
        centre = np.zeros(count)
        for _ in range(self.iterations):
            away = _distances(gram, centre)
            radius = float(np.median(away)) if self.norm is None else self.norm
            kept = np.where(away > radius, radius / np.where(away > 0, away, 1.0), 1.0)
            # (1 - mean(kept)) v + mean(kept step)
            centre = centre * (1 - kept.sum() / count) + kept / count
        return centre


class MultiKrum(ByGram):
    """The mean of the n - f - 2 steps that lie closest to their n - f - 2 nearest (Blanchard et al. 2017, arXiv
    1703.02757; that number as in Damaskinos et al. 2019, AggregaThor).

    Breakdown point below 1/2: it takes n >= 2 f + 3 senders.
    """

    rule: Literal["multi-krum"] = "multi-krum"

    @property
    def least(self) -> int:
        return 2 * self.attackers + 3

    def weights(self, gram: Array, attackers: int) -> Array:
        near = max(1, len(gram) - attackers - 2)
        squares = _apart(gram)
        np.fill_diagonal(squares, np.inf)
        scores = np.sort(squares, axis=1)[:, :near].sum(axis=1)
        weights = np.zeros(len(gram))
        # Of equals the first by the workers' names.
        weights[np.argsort(scores, kind="stable")[:near]] = 1 / near
        return weights


class GeometricMedian(ByGram):
    """The point with the least sum of distances to all steps, by smoothed Weiszfeld iterations (RFA: Pillutla et al.
    2022, arXiv 1912.13445, algorithm 2), all senders alike.

    Breakdown point 1/2. It begins in the middle of the nearer half, so that how far outliers are costs no iterations.
    """

    rule: Literal["geometric-median"] = "geometric-median"
    iterations: PositiveInt = Field(default=32, le=1000, description="most Weiszfeld iterations")

    def weights(self, gram: Array, attackers: int) -> Array:
        apart = np.sqrt(_apart(gram))
        central = int(apart.sum(axis=1).argmin())
        half = np.argsort(apart[central], kind="stable")[: len(gram) // 2 + 1]
        weights = np.zeros(len(gram))
        weights[half] = 1 / len(half)
        for _ in range(self.iterations):
            away = _distances(gram, weights)
            # A point that the middle falls upon counts much, but not without bound.
            inverse = 1 / np.maximum(away, max(1e-6 * float(np.median(away)), 1e-290))
            weights = inverse / inverse.sum()
        return weights


def _apart(gram: Array) -> Array:
    """Squared distances, [senders, senders]."""
    squares = gram.diagonal()
    apart: Array = np.maximum(squares[:, None] + squares - 2 * gram, 0)
    return apart


def _distances(gram: Array, weights: Array) -> Array:
    """Return each step's distance from the weighted sum of all, [senders]."""
    inner = (gram * weights).sum(axis=1)
    squares = gram.diagonal() - 2 * inner + (inner * weights).sum()
    away: Array = np.sqrt(np.maximum(squares, 0))
    return away


@dataclass(frozen=True)
class RobustSum(DerivedTensor):
    """As `WeightedSum`, whose sources and weights it has, with each step weighed by a rule and all times `share`.

    Reading it reads its sources twice: the rule wants to know all of them before the first is added.
    """

    weights: tuple[float, ...]
    rule: ByGram
    share: float

    def fill(self, out: Array, parts: Iterator[Array]) -> None:
        weights, counted = self._judged
        sources = (self.sources[0], *(self.sources[place + 1] for place in counted))
        wanted = {0, *(place + 1 for place in counted)}
        summed = WeightedSum(self.shape, self.dtype, sources, weights)
        summed.fill(out, (part for place, part in enumerate(parts) if place in wanted))

    @cached_property
    def _judged(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """The weights of those that count, and their places among the senders."""
        base, *sent = self.sources
        gram = gram_of(
            [
                WeightedSum(self.shape, self.dtype, (base, one), (-weight,))
                for one, weight in zip(sent, self.weights, strict=True)
            ]
        )
        # A step whose squares overflow is infinitely far off, and one attacker less.
        counted = np.flatnonzero(np.isfinite(gram.diagonal()))
        if not counted.size:
            return (), ()
        hostile = max(0, self.rule.attackers - (len(sent) - counted.size))
        judged = self.rule.weights(gram[np.ix_(counted, counted)], hostile)
        some = [(float(weight), int(place)) for weight, place in zip(judged, counted, strict=True) if weight]
        weights = tuple(self.weights[place] * weight * self.share for weight, place in some)
        return weights, tuple(place for _, place in some)


def gram_of(steps: Sequence[Tensor]) -> Array:
    """Return their inner products, float64 [steps, steps]: of a piece in the steps' own type, and wide over the
    pieces."""
    gram = np.zeros((len(steps), len(steps)))
    with np.errstate(over="ignore", invalid="ignore"):
        for parts in lockstep(steps):
            for start in range(0, len(parts[0]), PIECE):
                rows = [part[start : start + PIECE] for part in parts]
                for place, row in enumerate(rows):
                    for other in range(place + 1):
                        gram[place, other] += np.einsum("i,i", row, rows[other])
    lower = np.tril(gram, -1)
    return gram + lower.T


# ---------------------------------------------------------------- a round's blocks


Robust = Annotated[
    Mean | Median | TrimmedMean | CentredClipping | MultiKrum | GeometricMedian,
    Field(discriminator="rule"),
]
"""The rule that computes a block's step from the steps that were sent."""


def guarded(
    rule: RobustRule,
    model: Mapping[str, Tensor],
    senders: Sequence[Mapping[str, Tensor]],
    normalization: Normalization,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the blocks that enough workers sent, stepped by the rule, and the names of those that only fewer did.

    With `normalization` of `cohort` a step is damped by the share of all workers that sent the block. Raises
    ValueError if a shape differs.
    """
    moved: dict[str, Tensor] = {}
    few: list[str] = []
    for name, base in model.items():
        sent = [blocks[name] for blocks in senders if name in blocks]
        if any(tensor.shape != base.shape for tensor in sent):
            raise ValueError(f"shapes differ from {base.shape}: {[tensor.shape for tensor in sent]}")
        if len(sent) >= rule.least:
            share = 1.0 if normalization == "participants" else len(sent) / len(senders)
            moved[name] = SteppedTensor(base.shape, base.dtype, (base, rule.step(base, sent, share)))
        elif sent:
            few.append(name)
    return moved, few
