"""The messages of a secure sum: what the parties agree on, sign and send. Signatures are made elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import combinations
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tessera.shared.model.blocks import Name
from tessera.shared.privacy.discrete_gaussian import MAX_DEVIATION
from tessera.shared.privacy.noise_shares import EXACT, MAX_EXPONENT, TAIL, epsilon_of, rho_of, squared_norm_bound
from tessera.shared.run_settings import WEAK_EPSILON
from tessera.shared.schema import Digest, Identifier, Label, Message, Rounds, canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.tensors.lazy import digest_of

LEAST_QUORUM = 3
"""With two senders each could subtract its own update from the sum."""

MAX_HELPERS = 7
MAX_SENDERS = 1_024
MAX_WEIGHT = 1 << 40
MAX_SITE_WEIGHT = 64
MAX_BLOCKS = 16_384
MAX_ABANDONED = 64

NOISE_BITS: Literal[32] = 32
"""Of sums with noise: its tail needs room."""
MOST_SENDERS = {16: 256, 32: MAX_SENDERS}
"""By bits of a sum: more senders would leave each of them fewer than 127 levels."""

SEED_BYTES = 32
SEALED_BYTES = 48
"""The bytes by which a sealed message is longer than its text: an X25519 key and the tag of AES-256-GCM."""

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A public key."""
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
"""An Ed25519 signature (RFC 8032)."""
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{4}(-[0-9a-f]{4}){7}$")]
"""The start of a public key's SHA-256, for people to compare."""


def fingerprint(public: Hex32) -> Fingerprint:
    """Return 128 bits of a public key's SHA-256 in groups of four digits."""
    digits = hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]
    return "-".join(digits[place : place + 4] for place in range(0, len(digits), 4))


class SiteKeys(Message):
    """A site's public keys, as its worker declares them."""

    site: Label
    identity: Hex32
    """Its long-term key, of which others have the fingerprint."""
    sealing_key: Hex32
    """Its present key for messages to it."""
    weight: int = Field(default=1, ge=1, le=MAX_SITE_WEIGHT)
    """Its weight in exact sums, by its own settings."""
    signature: Hex64
    """Of the sealing key and the weight, by the identity."""


def tolerance_of(helpers: int) -> int:
    """Return the number of helpers that may cheat together without learning a mask."""
    return max(1, (helpers - 1) // 3)


def signatures_of(helpers: int) -> int:
    """Return the number of helpers that must sign a set of senders: enough that two sets share an honest helper."""
    return (helpers + tolerance_of(helpers)) // 2 + 1


def seeds_of(helpers: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each seed of a sender, the helpers that do *not* get it.

    There is one for each group of as many helpers as may cheat: such a group lacks its own seed, and any larger one
    has all.
    """
    return tuple(combinations(range(helpers), tolerance_of(helpers)))


def share_out(helpers: int, answering: Sequence[int], done: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
    """Return the seeds whose masks each answering helper sums up, as evenly as may be: each seed's once, but for
    those that are done.

    Raises SumRefused if some seed is with none of them.
    """
    found: dict[int, list[int]] = {helper: [] for helper in answering}
    for number, without in enumerate(seeds_of(helpers)):
        having = [helper for helper in answering if helper not in without]
        if number in done:
            continue
        if not having:
            raise SumRefused("committee", f"{len(answering)} helpers do not have all seeds")
        found[min(having, key=lambda helper: (len(found[helper]), helper))].append(number)
    return {helper: tuple(numbers) for helper, numbers in found.items() if numbers}


class RingBlock(Message):
    """A block as integers."""

    elements: PositiveInt = Field(lt=1 << 40)
    exponent: int = Field(ge=-MAX_EXPONENT, le=MAX_EXPONENT)
    """The logarithm to base 2 of the value of 1."""


def levels_of(bits: int, senders: int) -> int:
    """Return the largest integer of one sender, so that no sum of all of them overflows."""
    return ((1 << (bits - 1)) - 1) // senders


class NoiseTerms(Message):
    """Client-level privacy of a run's sums: the clip norm of each site's whole update, and its share of the noise.

    (epsilon, delta) bounds what all sums of the run together reveal about one site, as long as `honest_sites` of the
    senders of each block, the site among them, add their noise and keep it to themselves.
    """

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    rounds: Annotated[Rounds, Field(gt=0)]
    clip_norm: float = Field(gt=0)
    honest_sites: PositiveInt
    deviation: PositiveInt = Field(le=MAX_DEVIATION)
    """The parameter sigma of a site's discrete Gaussian noise, in steps of the grid."""


class Agreement(Message):
    """A helper's signature under a set of senders, or under terms that it signs no set of any more."""

    helper: NonNegativeInt
    senders: Digest
    """The digest of the set, or that of the abandoned terms."""
    signature: Hex64


class Terms(Message):
    """The terms of one round's secure sum."""

    run: Identifier
    round: PositiveInt
    attempt: PositiveInt
    version: Digest
    """The manifest that all senders start from."""
    values: Digest
    """The values of its model (`Manifest.values`). Two sums from the same values differ by single updates."""
    settings: Digest
    """All else that decides what a sender trains and sends (`Task.alike_digest`)."""
    helpers: tuple[SiteKeys, ...] = Field(min_length=3, max_length=MAX_HELPERS)
    quorum: int = Field(ge=LEAST_QUORUM, le=MAX_SENDERS)
    """The least senders of a block: a block that fewer sent is not opened."""
    max_senders: int = Field(ge=LEAST_QUORUM, le=MAX_SENDERS)
    max_weight: int = Field(ge=1, le=MAX_WEIGHT)
    bits: Literal[16, 32]
    """Values are integers modulo 2 to this power."""
    blocks: dict[Name, RingBlock] = Field(min_length=1, max_length=MAX_BLOCKS)
    """Each block that a site may send."""
    noise: NoiseTerms | None = None
    """For client-level privacy; None for exact sums."""
    repeat_model: bool = False
    """Updates from these values may have gone into another sum: each site's operator has to allow it."""
    abandoned: dict[Digest, tuple[Agreement, ...]] = Field(default={}, max_length=MAX_ABANDONED)
    """Earlier terms with the same values, with the signatures of helpers that sign no set under them."""

    @model_validator(mode="after")
    def _noise_fits(self) -> Self:
        noise = self.noise
        if noise is None:
            return self
        if self.round > noise.rounds:
            raise ValueError(f"the noise is for {noise.rounds} rounds, and this is round {self.round}")
        if noise.honest_sites > self.quorum:
            raise ValueError(f"{noise.honest_sites} shares of noise cannot come from {self.quorum} sites")
        if self.max_weight != 1 or len({block.exponent for block in self.blocks.values()}) > 1:
            raise ValueError("with noise, all sites weigh 1 and all blocks have one scale")
        if self.clip + TAIL * noise.deviation > self.levels:
            raise ValueError(f"updates and noise have no room in {self.bits} bits for {self.max_senders} senders")
        if self.squared_norm_bound >= EXACT:
            raise ValueError("the grid is too fine for a site to compute the exact norm of its integers")
        return self

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.quorum > self.max_senders:
            raise ValueError(f"the quorum {self.quorum} is above the {self.max_senders} senders that there can be")
        if len({helper.site for helper in self.helpers}) < len(self.helpers):
            raise ValueError("two helpers are of one site")
        if self.levels < 1:
            raise ValueError(f"{self.max_senders} senders have no room in {self.bits} bits")
        return self

    @cached_property
    def digest(self) -> Digest:
        return digest_of(canonical(self))

    @property
    def is_exact(self) -> bool:
        """True if differences of such sums reveal updates: they have no noise, or too little to count."""
        return self.noise is None or self.noise.epsilon > WEAK_EPSILON

    @property
    def tolerance(self) -> int:
        return tolerance_of(len(self.helpers))

    @property
    def signatures(self) -> int:
        return signatures_of(len(self.helpers))

    @property
    def levels(self) -> int:
        """The largest integer of one sender, so that no sum of all of them overflows."""
        return levels_of(self.bits, self.max_senders)

    @property
    def clip(self) -> float:
        """The clip norm in steps of the grid. Only for terms with noise."""
        assert self.noise  # noqa: S101 (for the types)
        return self.noise.clip_norm * 2.0 ** -next(iter(self.blocks.values())).exponent

    @property
    def squared_norm_bound(self) -> float:
        """The bound on a site's integers before noise: the squared l2 norm over all blocks. Only with noise."""
        return squared_norm_bound(self.clip, sum(block.elements for block in self.blocks.values()))

    @property
    def rho(self) -> float:
        """The zCDP of one such round, which follows from the noise. Only with noise."""
        assert self.noise  # noqa: S101 (for the types)
        values = sum(block.elements for block in self.blocks.values())
        return rho_of(self.squared_norm_bound, self.noise.deviation, self.noise.honest_sites, values)

    @property
    def epsilon(self) -> float:
        """The bound for a run of such rounds, at the delta of the terms. Only with noise."""
        assert self.noise  # noqa: S101 (for the types)
        return epsilon_of(self.noise.rounds * self.rho, self.noise.delta)

    @property
    def seeds(self) -> tuple[tuple[int, ...], ...]:
        return seeds_of(len(self.helpers))

    def seeds_of(self, helper: int) -> tuple[int, ...]:
        """Return the numbers of the seeds that a helper gets."""
        return tuple(number for number, without in enumerate(self.seeds) if helper not in without)


_MAX_SEALED = 4 * (15 * SEED_BYTES + SEALED_BYTES + 2) // 3 + 4
"""Base64 digits of the seeds that one helper of seven gets."""


class EnvelopeContents(Message):
    """The signed part of an envelope."""

    terms: Digest
    site: Label
    identity: Hex32
    weight: PositiveInt = Field(le=MAX_WEIGHT)
    blocks: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=MAX_BLOCKS // 4)]
    """A bit for each block of the terms, in the order of their names: whether the update has it."""
    update: Digest
    seeds: tuple[Annotated[str, Field(max_length=_MAX_SEALED)], ...] = Field(min_length=3, max_length=MAX_HELPERS)
    """For each helper in the terms' order, its seeds, sealed; base64."""


class Envelope(EnvelopeContents):
    """A site's signed statement about its update."""

    signature: Hex64

    @property
    def digest(self) -> Digest:
        return digest_of(canonical(self))

    def block_names(self, terms: Terms) -> tuple[str, ...]:
        """Return the names of the blocks that the update has. Raises SumRefused for bits beyond the terms' blocks."""
        bits = int(self.blocks or "0", 16)
        if bits >> len(terms.blocks):
            raise SumRefused("malformed", f"the envelope of {self.site} names blocks that the terms do not have")
        return tuple(name for place, name in enumerate(sorted(terms.blocks)) if bits >> place & 1)


class SumDocument(Message):
    """The subject of a helper's task: the senders of a round and, to open their sum, the helpers' signatures."""

    envelopes: tuple[Envelope, ...] = Field(max_length=MAX_SENDERS)
    agreements: tuple[Agreement, ...] = Field(default=(), max_length=MAX_HELPERS)
