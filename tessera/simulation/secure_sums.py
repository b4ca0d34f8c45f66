"""Secure sums in a simulation: the same integers as over HTTP, without the masks, which cancel to the bit.

Signatures and terms are made and checked as they are over HTTP. The keys follow from the sites' names, and those of
noise from the tasks' seeds: they protect nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tessera.shared.secure_sums.keys import SealingKey, SigningKey
from tessera.shared.secure_sums.messages import Hex32, SiteKeys, fingerprint
from tessera.shared.secure_sums.roster import signed_keys
from tessera.worker.state.site_keys import SumParty


@dataclass(frozen=True)
class NamedKeys:
    """The keys of a virtual site."""

    site: str

    def identity(self) -> SigningKey:
        return _identity(self.site)

    def sealing_keys(self) -> Mapping[Hex32, SealingKey]:
        key = SealingKey(_digest("sealing", self.site))
        return {key.public: key}

    def public(self, site: str, weight: int = 1) -> SiteKeys:
        return signed_keys(site, self.identity(), next(iter(self.sealing_keys())), weight)


def keys_of(sites: Iterable[str]) -> dict[str, SiteKeys]:
    """Return the public keys of sites by their names."""
    return {site: NamedKeys(site).public(site) for site in sites}


def party_of(site: str, sites: Iterable[str], weight: int) -> SumParty:
    """Return a virtual site of this weight that knows the keys of these others."""
    roster = {name: fingerprint(_identity(name).public) for name in sites}
    keys = NamedKeys(site)
    known = (site, keys, roster, 0)
    return SumParty(
        *known,
        helper=False,
        agreements=None,
        masks=False,
        noise_key=noise_key_of,
        weight=weight,
        embeddings=True,
    )


def noise_key_of(seed: int) -> bytes:
    """Derive the key of an update's noise from the seed of its task, so that a simulation is reproducible."""
    return _digest("noise", str(seed))


@cache
def _identity(site: str) -> SigningKey:
    return SigningKey(_digest("identity", site))


def _digest(purpose: str, site: str) -> bytes:
    return hashlib.sha256(f"{purpose} of {site}".encode()).digest()
