"""Checks of other sites' keys, and of a round's terms, by this site's own knowledge."""

from __future__ import annotations

from collections.abc import Mapping

from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SigningKey, require_signature
from tessera.shared.secure_sums.messages import LEAST_QUORUM, Fingerprint, Hex32, SiteKeys, Terms, fingerprint

SEALING_KEY = "sealing key"
"""The purpose of a site's signature under its sealing key and its weight."""

ROUNDING = 1e-9
"""Relative difference between two machines' figures of one epsilon."""

Roster = Mapping[str, Fingerprint]
"""The fingerprint of each site's key, as its people reported it to those of this one. The coordinator's word does not
count: it could enrol sites that do not exist."""


def signed_keys(site: str, identity: SigningKey, sealing_key: Hex32, weight: int = 1) -> SiteKeys:
    """Return the public keys of a site for others, with its weight and its signature."""
    signature = identity.sign(SEALING_KEY, _signed(sealing_key, weight))
    about = {"identity": identity.public, "sealing_key": sealing_key, "weight": weight}
    return SiteKeys(site=site, signature=signature, **about)


def _signed(sealing_key: Hex32, weight: int) -> bytes:
    return bytes.fromhex(sealing_key) + weight.to_bytes()


def check_keys(keys: SiteKeys, roster: Roster) -> None:
    """Raise SumRefused unless these are the keys of the site that the roster has."""
    require_known(roster, keys.site, keys.identity)
    message = _signed(keys.sealing_key, keys.weight)
    require_signature(keys.identity, SEALING_KEY, message, keys.signature, keys.site)


def require_known(roster: Roster, site: str, identity: Hex32) -> None:
    """Raise SumRefused unless the roster has a site under this key."""
    if (known := roster.get(site)) is None:
        raise SumRefused("not-in-roster", f"the site {site} is not in the roster of this site")
    if known != fingerprint(identity):
        raise SumRefused(
            "not-in-roster", f"the key of {site} has the fingerprint {fingerprint(identity)}; the roster has {known}"
        )


def check_terms(terms: Terms, roster: Roster, least_quorum: int = LEAST_QUORUM) -> None:
    """Check terms by this site's own knowledge. Raises SumRefused.

    A site checks this before it trains, and a helper before it signs.
    """
    if terms.quorum < least_quorum:
        raise SumRefused("quorum", f"sums of {terms.quorum} sites are to be opened; this site allows {least_quorum}")
    for helper in terms.helpers:
        check_keys(helper, roster)
    for keys in ({helper.identity for helper in terms.helpers}, {helper.sealing_key for helper in terms.helpers}):
        if len(keys) < len(terms.helpers):
            raise SumRefused("committee", "two helpers have one key, and would count twice")
    if (noise := terms.noise) and terms.epsilon > noise.epsilon * (1 + ROUNDING):
        raise SumRefused(
            "noise",
            f"the noise of {noise.honest_sites} sites keeps {noise.rounds} rounds to epsilon {terms.epsilon:.4g} at "
            f"delta {noise.delta:g}; the terms claim {noise.epsilon:g}",
        )
