"""Client-level differential privacy: a site's whole update is clipped, and noise is added to the sum of all.

DP-FedAvg (McMahan et al. 2018, arXiv 1710.06963, algorithm 1) with flat clipping and equal weights. Neighbours are
two runs in which the same updates are accepted, and in one of which those of one site count as zero. One site then
changes the sum over all blocks by at most the clip norm, and the divisor is the same in every round.

With a quantile the clip norm follows it (Andrew et al. 2021, arXiv 1905.03871, algorithm 1), by a noisy count of the
updates within the norm. Sum and count together cost what one release with the run's noise multiplier z costs, if
z^-2 = z_sum^-2 + (2 sigma_count)^-2 (theorem 1).

With secure sums the coordinator adds nothing: sites clip and add the noise in shares (`shared.privacy.noise_shares`).
"""

import hashlib
import hmac
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import UPDATE_NORM, Plan, State, Update
from tessera.shared.model.blocks import Block
from tessera.shared.privacy import noise_shares
from tessera.shared.privacy.gaussian import epsilon_of, noise_multiplier_for
from tessera.shared.privacy.noise import NoiseSource, grid_of
from tessera.shared.privacy.noise_shares import MAX_GROWTH, NoiseShare, rho_for, share_for
from tessera.shared.run_settings import ClientPrivacy
from tessera.shared.secure_sums.messages import MAX_SENDERS, NOISE_BITS, NoiseTerms, levels_of
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.hashing import derive_seed
from tessera.shared.tensors.lazy import (
    Array,
    ComputedTensor,
    SteppedTensor,
    Tensor,
    WeightedSum,
    chunk_counts,
    numel,
    weighted_steps,
)
from tessera.shared.updates.update_file import DecodedTensor, EncodedTensor

PREFIX = "client_privacy."
CLIP_NORM = f"{PREFIX}clip_norm"
"""The scalar of a version with the clip norm of the round after it."""
NOISE = f"{PREFIX}noise_multiplier"
"""The noise multiplier of every round of the run, fixed at its start."""
EPSILON = f"{PREFIX}epsilon"
"""The bound on the information about one site in all versions up to this one, at the run's delta."""

MARGIN = 2.0**-12
"""Part of the clip norm that is left for rounding: norms measured on arrival are sums in float32."""
COUNT_SHARE = 0.1
"""Share of the privacy, in zCDP, that the count of adaptive clipping takes."""
CLIP_RATE = 0.2
"""Step size of adaptive clipping in the logarithm of the norm, from the paper."""


@dataclass(frozen=True)
class Noise:
    """Normal noise in float64, the same each time that it is read."""

    shape: tuple[int, ...]
    key: bytes = field(repr=False)
    deviation: float
    dtype: ClassVar[DType] = "F64"

    def chunks(self) -> Iterator[Array]:
        source = NoiseSource(self.key)
        for count in chunk_counts(numel(self)):
            yield self.deviation * source.normal(count)


def begun(spec: RunSpec, state: State) -> State:
    """Return the state before the first round, with the run's noise multiplier and first clip norm."""
    terms = spec.client_privacy
    if terms is None:
        return state
    # In secure sums, the noise of the shares that count, over the norm bound of a rounded update.
    in_shares = spec.secure_sums is not None
    noise = 1 / math.sqrt(2 * rho_of_round(spec)) if in_shares else noise_multiplier_for(terms, spec.rounds)
    return replace(state, scalars={**state.scalars, CLIP_NORM: terms.clip_norm, NOISE: noise, EPSILON: 0.0})


def stated_sites(spec: RunSpec) -> int:
    """Return the number of sites that client-level privacy protects, as far as the run's settings say it.

    These are the sites that may take part: at least those of one round, each of which a version is made from. The
    honest sites of a secure sum are fewer; they carry the noise, and the others are protected as well.
    """
    return max(spec.sites_per_round or 1, spec.cohort.asked or 1, len(spec.cohort.sites or ()))


def warnings(spec: RunSpec) -> list[str]:
    """Return a warning of a delta that would permit the release of a whole update in more than one of ten runs."""
    terms, sites = spec.client_privacy, stated_sites(spec)
    if terms is None or terms.delta <= 0.1 / sites:
        return []
    most = f"{0.1 / sites:.2g}"
    return [f"client_privacy.delta is {terms.delta:g}, which is large for {sites} sites: set it to {most} or less"]


def rho_of_round(spec: RunSpec) -> float:
    """Return the zCDP of each round whose noise sites add in shares."""
    assert spec.client_privacy  # noqa: S101 (for the types)
    return rho_for(spec.client_privacy) / spec.rounds


def noise_share(spec: RunSpec, values: int, senders: int) -> NoiseShare:
    """Return the grid of a round's sum, and each site's share of its noise. `values` are those of the largest update.

    Raises ValueError if the sum has no room for them.
    """
    assert spec.client_privacy and spec.honest_sites  # noqa: PT018, S101 (for the types)
    levels = levels_of(NOISE_BITS, senders)
    return share_for(rho_of_round(spec), spec.client_privacy.clip_norm, spec.honest_sites, values, levels)


def noise_terms(spec: RunSpec, share: NoiseShare) -> NoiseTerms:
    """Return the terms of a round's noise, on which all parties agree."""
    terms = spec.client_privacy
    assert terms and spec.honest_sites  # noqa: PT018, S101 (for the types)
    return NoiseTerms(
        epsilon=terms.epsilon,
        delta=terms.delta,
        rounds=spec.rounds,
        clip_norm=terms.clip_norm,
        honest_sites=spec.honest_sites,
        deviation=share.deviation,
    )


def check_room(spec: RunSpec, values: int) -> None:
    """Raise ValueError if sums of the run's sites have no room for the noise, or if rounding such an update would
    need much more noise than the update itself."""
    senders = spec.cohort.asked or MAX_SENDERS
    share = noise_share(spec, values, senders)
    if share.growth > MAX_GROWTH:
        raise ValueError(
            f"in sums of {senders} sites, rounding {values:,} values takes {share.growth:.2g} times the noise of "
            "the steps themselves: set cohort.size to fewer sites, raise client_privacy.epsilon, or choose a method "
            "that trains fewer values"
        )


@dataclass(frozen=True)
class SummedRelease:
    """The release of a sum to which sites added the noise: it is accounted for here, and changes no more."""

    spec: RunSpec

    def __call__(self, state: State, merged: State) -> State:
        """Return the merged state with the epsilon so far."""
        terms = self.spec.client_privacy
        assert terms  # noqa: S101 (for the types)
        spent = noise_shares.epsilon_of(merged.round * rho_of_round(self.spec), terms.delta)
        changed = {CLIP_NORM: terms.clip_norm, NOISE: state.scalars[NOISE], EPSILON: spent}
        return replace(merged, scalars={**merged.scalars, **changed})


def anonymous(updates: Sequence[Update]) -> list[Update]:
    """Return the updates as a method may see them: of equal weight, and without their sites' reports."""
    return [replace(update, examples=1, metrics={}, weights={}) for update in updates]


@dataclass(frozen=True)
class NoisyMean:
    """The noisy mean of a round's clipped updates, which takes the place of its method's mean."""

    terms: ClientPrivacy
    divisor: int
    blocks: Sequence[Block]
    """The model's."""
    plans: Sequence[Plan]
    """The accepted updates' plans. Each block that one of them uploads gets noise, whether it was sent or not."""
    updates: Sequence[Update]
    """One of each site."""
    key: bytes = field(repr=False)

    def __call__(self, state: State, merged: State) -> State:
        """Return the state that a method `merged` from `state`, its blocks moved by the noisy mean instead."""
        clip, multiplier = state.scalars[CLIP_NORM], state.scalars[NOISE]
        norms = [step_norm(state.model, update) for update in self.updates]
        spent = epsilon_of(multiplier, merged.round, self.terms.delta)
        changed = {CLIP_NORM: self._next_clip(norms, clip, multiplier), NOISE: multiplier, EPSILON: spent}
        moved = self._moved(state.model, norms, clip, multiplier)
        return replace(merged, model={**state.model, **moved}, scalars={**merged.scalars, **changed})

    def _moved(
        self, model: Mapping[str, Tensor], norms: Sequence[float], clip: float, multiplier: float
    ) -> dict[str, Tensor]:
        limit = clip * (1 - MARGIN)
        senders = [
            (min(1.0, limit / norm), update.blocks)
            for norm, update in zip(norms, self.updates, strict=True)
            # An update of zero adds nothing, and nothing that is not finite was accepted.
            if 0 < norm < math.inf
        ]
        deviation = multiplier / math.sqrt(1 - self._count_share) * clip
        mean = partial(_noisy_mean, grid_of(deviation), float(self.divisor))
        moved: dict[str, Tensor] = {}
        for name in {block.name for plan in self.plans for block in plan.upload.resolve(self.blocks)}:
            base = model[name]
            # The sign is turned, as in `mean_step`.
            total = _wide_sum(base, [(-factor, blocks[name]) for factor, blocks in senders if name in blocks])
            noise = Noise(base.shape, derived_key(self.key, f"block/{name}"), deviation)
            step = ComputedTensor(base.shape, "F64", (total, noise), mean)
            moved[name] = SteppedTensor(base.shape, base.dtype, (base, step))
        return moved

    def _next_clip(self, norms: Sequence[float], clip: float, multiplier: float) -> float:
        if self.terms.clip_quantile is None:
            return clip
        # One site changes the sum of these halves by one half.
        count = sum(0.5 if norm <= clip else -0.5 for norm in norms)
        deviation = multiplier / (2 * math.sqrt(self._count_share))
        noise = deviation * NoiseSource(derived_key(self.key, "count")).normal(1)
        # The number that came is public. With another divisor the norm would settle at another quantile, or nowhere;
        # with theirs alone, few updates would carry much noise.
        came, most = len(norms), max(self.divisor, len(norms))
        within = float(_on_grid(count + noise, grid_of(deviation))[0]) / most + 0.5
        return next_clip(clip, within, 0.5 + (self.terms.clip_quantile - 0.5) * came / most)

    @property
    def _count_share(self) -> float:
        return 0.0 if self.terms.clip_quantile is None else COUNT_SHARE


def next_clip(clip: float, within: float, quantile: float) -> float:
    """Return the clip norm after a round in which this share of the updates, with noise, was within the last one."""
    return clip * math.exp(-CLIP_RATE * (min(1.0, max(0.0, within)) - quantile))


def step_norm(model: Mapping[str, Tensor], update: Update) -> float:
    """Return the l2 norm of an update's step over all of its blocks.

    The coordinator measured it on arrival if the steps are differences of the received values. Pooled updates, and
    those that are summed as they were sent, are read here.
    """
    if UPDATE_NORM in update.metrics and all(map(_is_as_measured, update.blocks.values())):
        return update.metrics[UPDATE_NORM]
    squares = 0.0
    for name, tensor in update.blocks.items():
        for chunk in _wide_sum(model[name], [(1.0, tensor)]).chunks():
            squares += float(np.einsum("i,i", chunk, chunk))
    return math.sqrt(squares)


def simulated_key(seed: int, number: int) -> bytes:
    """Derive a round's key from the run's seed, so that a simulation is reproducible. It protects no site."""
    return hashlib.sha256(str(derive_seed(seed, "client-privacy", number)).encode()).digest()


def _is_as_measured(tensor: Tensor) -> bool:
    return isinstance(tensor, EncodedTensor | DecodedTensor) and not tensor.sent_as_steps


def _wide_sum(base: Tensor, senders: Sequence[tuple[float, Tensor]]) -> WeightedSum:
    """Return the weighted sum in float64: in float32, one site's step would change the rounding of all others."""
    return replace(weighted_steps(base, senders), dtype="F64")


def _noisy_mean(grid: float, divisor: float, parts: Sequence[Array]) -> Array:
    """Return the noisy sum on the grid, which alone is released, over the divisor."""
    total, noise = parts
    mean: Array = _on_grid(total + noise, grid) / divisor
    return mean


def _on_grid(values: Array, grid: float) -> Array:
    rounded: Array = np.rint(values / grid) * grid
    return rounded


def derived_key(key: bytes, purpose: str) -> bytes:
    """Derive the key of one block's noise, or of the count's, from a round's key."""
    return hmac.digest(key, purpose.encode(), "sha256")
