"""Envelopes: a sender's signature beside its masked update, and its masks' seeds, sealed to the helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.shared.schema import Digest, canonical
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SealingKey, SigningKey, from_text, require_signature, seal, to_text
from tessera.shared.secure_sums.masks import new_seed
from tessera.shared.secure_sums.messages import SEALED_BYTES, SEED_BYTES, Envelope, EnvelopeContents, Terms

PURPOSE = "masked update"


def _require_signed(envelope: Envelope) -> None:
    signed = EnvelopeContents.model_validate(envelope.model_dump())
    require_signature(envelope.identity, PURPOSE, canonical(signed), envelope.signature, envelope.site)


def opened_seeds(envelope: Envelope, terms: Terms, helper: int, key: SealingKey) -> Mapping[int, bytes]:
    """Return the seeds that a helper of the terms gets, by their numbers. Raises SumRefused."""
    text = key.open(from_text(envelope.seeds[helper]), _context(terms, envelope.site, helper), envelope.site)
    numbers = terms.seeds_of(helper)
    if len(text) != SEED_BYTES * len(numbers):
        raise SumRefused("seeds", f"{envelope.site} sealed {len(text)} bytes to {terms.helpers[helper].site}")
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
    """Seal the seeds of an update to the helpers, and sign its description."""
    places = {name: place for place, name in enumerate(sorted(terms.blocks))}
    bits = sum(1 << places[name] for name in set(blocks))
    sealed = []
    for number, helper in enumerate(terms.helpers):
        own = b"".join(seeds[n] for n in terms.seeds_of(number))
        sealed.append(seal(helper.sealing_key, own, _context(terms, site, number), helper.site))
    contents = EnvelopeContents(
        terms=terms.digest,
        site=site,
        identity=identity.public,
        weight=weight,
        blocks=f"{bits:x}",
        update=update,
        seeds=tuple(map(to_text, sealed)),
    )
    signature = identity.sign(PURPOSE, canonical(contents))
    return Envelope(**contents.model_dump(), signature=signature)


def own_blocks(envelope: Envelope, terms: Terms) -> tuple[str, ...]:
    """Return the blocks of an envelope that belongs to these terms, and that its identity signed, be it whose it may.

    Raises SumRefused.
    """
    _require_signed(envelope)
    if envelope.terms != terms.digest:
        raise SumRefused("terms-differ", f"{envelope.site} sent its update under other terms")
    if envelope.weight > terms.max_weight:
        raise SumRefused("scales", f"the weight of {envelope.site} is above {terms.max_weight}")
    if len(envelope.seeds) != len(terms.helpers):
        raise SumRefused("seeds", f"{envelope.site} sealed seeds to {len(envelope.seeds)} helpers")
    for number, sealed in enumerate(envelope.seeds):
        if len(from_text(sealed)) != SEED_BYTES * len(terms.seeds_of(number)) + SEALED_BYTES:
            raise SumRefused("seeds", f"{envelope.site} sealed no {len(terms.seeds_of(number))} seeds to a helper")
    return envelope.block_names(terms)


def _context(terms: Terms, site: str, helper: int) -> bytes:
    """Return the data that bind sealed seeds to their sender and helper: copied into another's envelope they do not
    open."""
    return f"tessera seeds {terms.digest}/{site}/{helper}".encode()
