"""What a sender signs beside its masked update, with the seeds of its masks sealed to the helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, PositiveInt

from tessera.shared.schema import Digest, Label, Message, canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import (
    SEALED_BYTES,
    Hex32,
    Hex64,
    SealingKey,
    SigningKey,
    from_text,
    require_signature,
    seal,
    to_text,
)
from tessera.shared.secure_sums.masks import SEED_BYTES, new_seed
from tessera.shared.secure_sums.terms import MAX_BLOCKS, MAX_HELPERS, MAX_WEIGHT, Roster, Terms
from tessera.shared.tensors.lazy import digest_of

PURPOSE = "masked update"
_MAX_SEALED = 4 * (15 * SEED_BYTES + SEALED_BYTES + 2) // 3 + 4
"""Base64 digits of the seeds that one helper of seven gets."""


class Contents(Message):
    """What a sender signs."""

    terms: Digest
    site: Label
    weight: PositiveInt = Field(le=MAX_WEIGHT)
    blocks: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=MAX_BLOCKS // 4)]
    """A bit for each block of the terms, in the order of their names: whether the update has it."""
    update: Digest
    seeds: tuple[Annotated[str, Field(max_length=_MAX_SEALED)], ...] = Field(min_length=3, max_length=MAX_HELPERS)
    """For each helper in the terms' order, its seeds, sealed; base64."""


class Envelope(Contents):
    """A site's signed statement of what it sent."""

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

    def require_signed(self, identity: Hex32) -> None:
        """Raise SumRefused unless the owner of this key signed the envelope."""
        signed = Contents.model_validate(self.model_dump())
        require_signature(identity, PURPOSE, canonical(signed), self.signature, self.site)

    def opened_seeds(self, terms: Terms, helper: int, key: SealingKey) -> Mapping[int, bytes]:
        """Return the seeds that a helper of the terms gets, by their numbers. Raises SumRefused."""
        text = key.open(from_text(self.seeds[helper]), _context(terms, self.site, helper))
        numbers = terms.seeds_of(helper)
        if len(text) != SEED_BYTES * len(numbers):
            raise SumRefused("seeds", f"{self.site} sealed {len(text)} bytes to {terms.helpers[helper].site}")
        return {number: text[SEED_BYTES * n : SEED_BYTES * (n + 1)] for n, number in enumerate(numbers)}


def new_seeds(terms: Terms) -> list[bytes]:
    """Return the seeds of one update: new ones for each, also when an update is sent again."""
    return [new_seed() for _ in terms.seeds]


def make_envelope(
    terms: Terms,
    site: str,
    identity: SigningKey,
    weight: int,
    blocks: Sequence[str],
    update: Digest,
    seeds: Sequence[bytes],
) -> Envelope:
    """Seal the seeds of an update to the helpers, and sign what it is."""
    places = {name: place for place, name in enumerate(sorted(terms.blocks))}
    bits = sum(1 << places[name] for name in set(blocks))
    sealed = (
        seal(helper.sealing_key, b"".join(seeds[n] for n in terms.seeds_of(number)), _context(terms, site, number))
        for number, helper in enumerate(terms.helpers)
    )
    contents = Contents(
        terms=terms.digest,
        site=site,
        weight=weight,
        blocks=f"{bits:x}",
        update=update,
        seeds=tuple(map(to_text, sealed)),
    )
    signature = identity.sign(PURPOSE, canonical(contents))
    return Envelope(**contents.model_dump(), signature=signature)


def check_envelope(envelope: Envelope, terms: Terms, roster: Roster) -> tuple[str, ...]:
    """Return the blocks of an envelope that belongs to these terms, and that a site of the roster signed.

    Raises SumRefused.
    """
    if envelope.site not in roster:
        raise SumRefused("not-in-roster", f"the sender {envelope.site} is not in the roster")
    envelope.require_signed(roster[envelope.site])
    if envelope.terms != terms.digest:
        raise SumRefused("terms-differ", f"{envelope.site} sent its update under other terms")
    if envelope.weight > terms.max_weight:
        raise SumRefused("scales", f"the weight of {envelope.site} is above {terms.max_weight}")
    if len(envelope.seeds) != len(terms.helpers):
        raise SumRefused("seeds", f"{envelope.site} sealed seeds to {len(envelope.seeds)} helpers")
    return envelope.block_names(terms)


def _context(terms: Terms, site: str, helper: int) -> bytes:
    """Return what binds sealed seeds to their sender and helper: copied into another's envelope they do not open."""
    return f"tessera seeds {terms.digest}/{site}/{helper}".encode()
