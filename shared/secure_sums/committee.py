"""The rules of helpers: which set of senders they sign, and when they return the sum of its masks.

No update may enter two sums: their difference, or an equation of several, would be one site's update. So a helper
signs at most one set for each round of a run, and of exact sums one for the values of a model, over all runs. It
opens a set only with enough signatures that any two groups of signers share an honest helper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tessera.shared.schema import Digest, Label, Message, canonical
from tessera.shared.secure_sums.envelope import opened_seeds, own_blocks
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SealingKey, SigningKey, require_signature
from tessera.shared.secure_sums.masked_update import write_ring
from tessera.shared.secure_sums.masks import RING_DTYPES, MaskStream
from tessera.shared.secure_sums.messages import (
    LEAST_QUORUM,
    Agreement,
    Envelope,
    Hex32,
    SiteKeys,
    Terms,
    signatures_of,
)
from tessera.shared.secure_sums.roster import Roster, check_terms, require_known
from tessera.shared.tensors.hashing import Sink
from tessera.shared.tensors.lazy import as_bytes, chunk_counts, digest_of

AGREEMENT = "set of senders"
ABANDONMENT = "abandoned terms"
"""The purposes of a helper's signatures."""


class _Set(Message):
    terms: Digest
    envelopes: tuple[Digest, ...]
    """In the order of the sites."""


@dataclass(frozen=True)
class SenderSet:
    """The senders of a round, as the coordinator closed it."""

    terms: Terms
    envelopes: tuple[Envelope, ...]
    """In the order of the sites."""
    senders: Mapping[str, tuple[str, ...]]
    """The sites that sent each block, of all blocks that enough sent."""

    @property
    def digest(self) -> Digest:
        """Identifies the terms and each envelope, and so each masked update."""
        found = _Set(terms=self.terms.digest, envelopes=tuple(envelope.digest for envelope in self.envelopes))
        return digest_of(canonical(found))

    @property
    def sites(self) -> set[str]:
        """The sites with an update in a sum."""
        return set().union(*self.senders.values())

    @property
    def sites_of_all_blocks(self) -> set[str]:
        """The sites that sent every summed block."""
        return self.sites.intersection(*self.senders.values())

    def weight(self, block: str) -> int:
        """Return the weight of all senders of a block together."""
        return sum(envelope.weight for envelope in self.envelopes if envelope.site in self.senders[block])


def sender_set(terms: Terms, envelopes: Sequence[Envelope], roster: Roster | None = None) -> SenderSet:
    """Return the set of these senders. Raises SumRefused if one of them may not be in it.

    Without a roster, it takes the senders for who they say they are: what the coordinator does.
    """
    by_site = {envelope.site: envelope for envelope in envelopes}
    if len(by_site) < len(envelopes):
        raise SumRefused("duplicate-site", "a site occurs twice among the senders")
    if len(by_site) > terms.max_senders:
        raise SumRefused(
            "too-many-senders", f"{len(by_site)} senders came; the terms have room for {terms.max_senders}"
        )
    if len({envelope.identity for envelope in envelopes}) < len(envelopes):
        raise SumRefused("duplicate-site", "two sites have one key")
    senders: dict[str, list[str]] = {}
    for site in sorted(by_site):
        envelope = by_site[site]
        if roster is not None:
            require_known(roster, site, envelope.identity)
        for block in own_blocks(envelope, terms):
            senders.setdefault(block, []).append(site)
    enough = {block: tuple(sites) for block, sites in senders.items() if len(sites) >= terms.quorum}
    return SenderSet(terms, tuple(by_site[site] for site in sorted(by_site)), enough)


class Commitment(Message):
    """A set of senders that a helper signed or opened, or terms under which it signs none."""

    run: str
    round: int
    terms: Digest
    senders: Digest | None = None
    """The set; None for terms that are abandoned."""
    values: Digest | None = None
    """Of the model that the sites trained from, in an exact sum."""
    sites: tuple[Label, ...] = ()
    """The senders in an exact sum."""

    def forbids(self, other: Commitment, repeating: Collection[str]) -> bool:
        """Return True if a helper that is bound by this may not also be bound by `other`, in which the updates of
        the sites `repeating` may be summed again."""
        if self.senders is None or other.senders is None:
            return self.terms == other.terms and self.senders != other.senders
        if self.senders == other.senders:
            return False
        if (self.run, self.round) == (other.run, other.round):
            return True
        shared = self.values is not None and self.values == other.values and set(self.sites) & set(other.sites)
        # The update of a site that is in one of the sums alone would be the difference.
        return bool(shared) and not set(self.sites) == set(other.sites) <= set(repeating)


def forbidding(known: Iterable[Commitment], made: Commitment, repeating: Collection[str]) -> Commitment | None:
    """Return an earlier commitment that forbids a new one, if there is one."""
    return next((one for one in known if one.forbids(made, repeating)), None)


class Agreements(Protocol):
    """A helper's memory of its commitments, on disk."""

    def remember(self, made: Commitment, repeating: Collection[str] = ()) -> Commitment | None:
        """Record a commitment, on disk when it returns None; return an earlier one that forbids it."""
        ...


@dataclass(frozen=True)
class Member:
    """A helper at work."""

    site: str
    identity: SigningKey
    sealing_keys: Mapping[Hex32, SealingKey]
    """The sealing keys that it still has, by the public key."""
    roster: Roster
    agreements: Agreements
    least_quorum: int = LEAST_QUORUM

    def agree(self, terms: Terms, envelopes: Sequence[Envelope]) -> Agreement:
        """Sign a set of senders. Asked twice for one set, it returns the same. Raises SumRefused."""
        number, found, key = self._checked(terms, envelopes)
        for envelope in found.envelopes:
            opened_seeds(envelope, terms, number, key)
        self._commit(found)
        signature = self.identity.sign(AGREEMENT, found.digest.encode())
        return Agreement(helper=number, senders=found.digest, signature=signature)

    def abandon(self, run: str, number: int, terms: Digest, helper: int) -> Agreement:
        """Sign that this helper signs no set under these terms any more, for a round of a run in which it is the
        helper of this number. Raises SumRefused if it has signed or opened one."""
        if self.agreements.remember(Commitment(run=run, round=number, terms=terms)):
            raise SumRefused(
                "already-agreed",
                "a set of senders was signed or opened under these terms, so that its sum may be known. Go on with "
                "the run of these terms, or start from another version",
            )
        return Agreement(helper=helper, senders=terms, signature=self.identity.sign(ABANDONMENT, terms.encode()))

    def open(
        self,
        terms: Terms,
        envelopes: Sequence[Envelope],
        agreements: Sequence[Agreement],
        seeds: Sequence[int],
        file: Sink,
    ) -> Digest:
        """Write the sums of the senders' masks from the seeds of these numbers, block by block; return the digest.

        Raises SumRefused. Asked twice, it writes the same bytes.
        """
        number, found, key = self._checked(terms, envelopes)
        check_agreements(found, agreements)
        if strange := sorted(set(seeds) - set(terms.seeds_of(number))):
            raise SumRefused("seeds", f"this helper does not have the seeds {strange}")
        self._commit(found)
        opened = {envelope.site: opened_seeds(envelope, terms, number, key) for envelope in found.envelopes}
        chosen = {site: [own[n] for n in sorted(set(seeds))] for site, own in opened.items()}
        return write_mask_sums(file, found, chosen)

    def _checked(self, terms: Terms, envelopes: Sequence[Envelope]) -> tuple[int, SenderSet, SealingKey]:
        check_terms(terms, self.roster, self.least_quorum)
        number = next((n for n, helper in enumerate(terms.helpers) if helper.site == self.site), None)
        if number is None or terms.helpers[number].identity != self.identity.public:
            raise SumRefused("committee", f"{self.site} is not a helper of these terms")
        if (key := self.sealing_keys.get(terms.helpers[number].sealing_key)) is None:
            raise SumRefused("committee", f"{self.site} has erased the key that seeds were sealed to")
        found = sender_set(terms, envelopes, self.roster)
        if not found.senders:
            raise SumRefused("quorum", f"no block was sent by {terms.quorum} sites")
        return number, found, key

    def _commit(self, found: SenderSet) -> None:
        terms = found.terms
        made = Commitment(run=terms.run, round=terms.round, terms=terms.digest, senders=found.digest)
        if terms.is_exact:
            made = made.model_copy(update={"values": terms.values, "sites": tuple(sorted(found.sites))})
        earlier = self.agreements.remember(made, found.sites_of_all_blocks if terms.repeat_model else ())
        if earlier is None:
            return
        if earlier.senders is None:
            raise SumRefused("already-agreed", "these terms were abandoned: a later attempt replaces them")
        of_round = f"round {earlier.round}" if earlier.run == made.run else f"round {earlier.round} of {earlier.run}"
        detail = f"another set of senders of {of_round} was signed or opened before"
        if (earlier.run, earlier.round) != (made.run, made.round):
            detail += (
                ", from a model with the same values, and the difference of the sums could be one site's update. "
                "Start from another version; or set secure_sums.repeat_model, with exactly the sites of that set: "
                f"{', '.join(earlier.sites)}"
            )
        raise SumRefused("already-agreed", detail)


def check_agreements(found: SenderSet, agreements: Sequence[Agreement]) -> None:
    """Raise SumRefused unless enough different helpers signed this very set."""
    terms = found.terms
    signed = set()
    for agreement in agreements:
        if agreement.senders == found.digest:
            check_agreement(found, agreement)
            signed.add(agreement.helper)
    if len(signed) < terms.signatures:
        raise SumRefused(
            "too-few-signatures",
            f"{len(signed)} of {len(terms.helpers)} helpers signed this set; {terms.signatures} must",
        )


def check_agreement(found: SenderSet, agreement: Agreement) -> None:
    """Raise SumRefused unless the helper that it names signed this very set."""
    _require_signed(agreement, AGREEMENT, found.digest, found.terms.helpers)


def check_abandonment(terms: Digest, agreement: Agreement, helpers: Sequence[SiteKeys]) -> None:
    """Raise SumRefused unless the helper that it names signed that it signs no set under these terms."""
    _require_signed(agreement, ABANDONMENT, terms, helpers)


def _require_signed(agreement: Agreement, purpose: str, subject: Digest, helpers: Sequence[SiteKeys]) -> None:
    if agreement.senders != subject or agreement.helper >= len(helpers):
        raise SumRefused("signature", f"the agreement is about another {purpose}, or of no helper")
    helper = helpers[agreement.helper]
    require_signature(helper.identity, purpose, subject.encode(), agreement.signature, helper.site)


def is_abandoned(former: Digest, helpers: Collection[Hex32], terms: Terms) -> bool:
    """Return True if `terms`, whose helpers' keys were checked, prove that no set is ever opened under the former
    ones, which were of helpers with these keys."""
    signed = set[Hex32]()
    for agreement in terms.abandoned.get(former, ()):
        with suppress(SumRefused):
            check_abandonment(former, agreement, terms.helpers)
            signed.add(terms.helpers[agreement.helper].identity)
    return len(signed & set(helpers)) >= signatures_of(len(helpers))


def write_mask_sums(file: Sink, found: SenderSet, seeds: Mapping[str, Sequence[bytes]]) -> Digest:
    """Write, for each block of the set, the sum of its senders' masks from these seeds of each."""
    terms = found.terms

    def sums(block: str) -> Iterator[memoryview]:
        own = [seed for site in found.senders[block] for seed in seeds[site]]
        masks = MaskStream(own, terms.digest, block, terms.bits)
        for count in chunk_counts(terms.blocks[block].elements):
            total = np.zeros(count, RING_DTYPES[terms.bits])
            masks.add_to(total)
            yield as_bytes(total)

    return write_ring(file, terms, sorted(found.senders), sums)
