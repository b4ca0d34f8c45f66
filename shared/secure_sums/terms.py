"""What all senders and helpers of a round must agree on, to the byte, before any sum of it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import combinations
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from tessera.shared.model.blocks import Name
from tessera.shared.schema import Digest, Identifier, Label, Message, canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import Hex32, Hex64, SigningKey, require_signature
from tessera.shared.tensors.lazy import digest_of

LEAST_QUORUM = 3
"""With two senders each could subtract its own update from the sum."""

MAX_HELPERS = 7
MAX_SENDERS = 1_024
MAX_WEIGHT = 1 << 20
MAX_EXPONENT = 96
MAX_BLOCKS = 16_384

SEALING_KEY = "sealing key"
"""The purpose of a helper's signature under its key of the run."""

Roster = Mapping[str, Hex32]
"""The public key of each site, as its people told the people of this one. The coordinator's word does not count: it
could enrol sites that do not exist."""


class Helper(Message):
    """A member of the committee: who opens sums together with others."""

    site: Label
    identity: Hex32
    """Its long-term key, which the roster has."""
    sealing_key: Hex32
    """Its key of this run."""
    signature: Hex64
    """Of the sealing key, by the identity."""

    @classmethod
    def of(cls, site: str, identity: SigningKey, sealing_key: Hex32) -> Self:
        signature = identity.sign(SEALING_KEY, bytes.fromhex(sealing_key))
        return cls(site=site, identity=identity.public, sealing_key=sealing_key, signature=signature)


class RingBlock(Message):
    """A block as integers."""

    elements: PositiveInt = Field(lt=1 << 40)
    exponent: int = Field(ge=-MAX_EXPONENT, le=MAX_EXPONENT)
    """The logarithm to base 2 of what 1 stands for."""


class Terms(Message):
    """The terms of one round's secure sum."""

    run: Identifier
    round: PositiveInt
    attempt: PositiveInt
    version: Digest
    """The manifest that all senders start from."""
    helpers: tuple[Helper, ...] = Field(min_length=3, max_length=MAX_HELPERS)
    quorum: int = Field(ge=LEAST_QUORUM, le=MAX_SENDERS)
    """The least senders of a block: a block that fewer sent is not opened."""
    max_senders: int = Field(ge=LEAST_QUORUM, le=MAX_SENDERS)
    max_weight: int = Field(ge=1, le=MAX_WEIGHT)
    bits: Literal[16, 32]
    """Values are integers modulo 2 to this power."""
    blocks: dict[Name, RingBlock] = Field(min_length=1, max_length=MAX_BLOCKS)
    """Each block that a site may send."""

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
    def tolerance(self) -> int:
        """How many helpers may cheat together without learning a mask."""
        return max(1, (len(self.helpers) - 1) // 3)

    @property
    def signatures(self) -> int:
        """How many helpers must sign a set of senders: so many that two sets share an honest helper."""
        return (len(self.helpers) + self.tolerance) // 2 + 1

    @property
    def levels(self) -> int:
        """The largest integer of one sender, so that no sum of all of them overflows."""
        return ((1 << (self.bits - 1)) - 1) // self.max_senders

    @property
    def seeds(self) -> tuple[tuple[int, ...], ...]:
        """For each seed of a sender, the helpers that do *not* get it.

        There is one for each group of `tolerance` helpers: such a group lacks its own seed, and any larger one has
        all.
        """
        return tuple(combinations(range(len(self.helpers)), self.tolerance))

    def seeds_of(self, helper: int) -> tuple[int, ...]:
        """Return the numbers of the seeds that a helper gets."""
        return tuple(number for number, without in enumerate(self.seeds) if helper not in without)

    def share_out(self, answering: list[int]) -> dict[int, tuple[int, ...]]:
        """Return which seeds' masks each of these helpers sums up, each seed's once, as evenly as may be.

        Raises SumRefused if some seed is with none of them.
        """
        found: dict[int, list[int]] = {helper: [] for helper in answering}
        for number, without in enumerate(self.seeds):
            having = [helper for helper in answering if helper not in without]
            if not having:
                raise SumRefused("committee", f"{len(answering)} helpers do not have all seeds")
            found[min(having, key=lambda helper: (len(found[helper]), helper))].append(number)
        return {helper: tuple(numbers) for helper, numbers in found.items() if numbers}


def check_terms(terms: Terms, roster: Roster, least_quorum: int = LEAST_QUORUM) -> None:
    """Check terms by what this site knows itself. Raises SumRefused.

    A site checks this before it trains, and a helper before it signs.
    """
    if terms.quorum < least_quorum:
        raise SumRefused("quorum", f"sums of {terms.quorum} sites are to be opened; this site allows {least_quorum}")
    for helper in terms.helpers:
        if roster.get(helper.site) != helper.identity:
            raise SumRefused("not-in-roster", f"the helper {helper.site} does not have the key that the roster has")
        message = bytes.fromhex(helper.sealing_key)
        require_signature(helper.identity, SEALING_KEY, message, helper.signature, helper.site)
    if len({helper.sealing_key for helper in terms.helpers}) < len(terms.helpers):
        raise SumRefused("committee", "two helpers have one sealing key")
