"""The keys of a site for secure sums, and its record of its signatures as a helper.

Each key is a file of its own: an erased key would survive in the free pages and in the copies of a database.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from tessera.shared.privacy.noise import secret_key as new_noise_key
from tessera.shared.schema import Digest
from tessera.shared.secure_sums.committee import Commitment, forbidding
from tessera.shared.secure_sums.keys import SealingKey, SigningKey
from tessera.shared.secure_sums.messages import Fingerprint, Hex32, SiteKeys, fingerprint
from tessera.shared.secure_sums.roster import signed_keys
from tessera.worker.state.atomic_files import secret_key
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import ADOPT, Chain, ChainError, Link

KEYS_FOLDER = "keys"
RENEW_SECONDS = 7 * 86400.0
ERASE_SECONDS = 35 * 86400.0
"""A round whose helpers stay away for longer than this can no longer be opened."""
KEPT_KEYS = 6
"""The newest sealing keys, those of this week and of the five before it, which even a wrong clock does not erase."""


@dataclass(frozen=True)
class Keyring:
    """A site's keys in a folder that only its owner can read: a long-term key to sign with, and keys of a week each
    for messages to it, which are erased five weeks later."""

    folder: Path
    clock: Callable[[], float] = field(default=time.time, compare=False)

    def identity(self) -> SigningKey:
        """Return the long-term key, created if missing. Raises OSError, and ValueError for an invalid file."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return SigningKey(secret_key(self.folder / "identity.key"))

    def sealing_keys(self) -> Mapping[Hex32, SealingKey]:
        """Return the keys that are not erased yet, by the public key."""
        keys = (SealingKey(secret_key(path)) for _, path in self._files())
        return {key.public: key for key in keys}

    def public(self, site: str, weight: int = 1) -> SiteKeys:
        """Return the public keys for others, with a new sealing key if the last one is a week old."""
        now = self.clock()
        # A wrong clock dated the keys of later than now. They open what was sealed to them, and are not used again.
        past = sorted((created, path) for created, path in self._files() if created <= now)
        for created, path in past[:-KEPT_KEYS]:
            if created < now - ERASE_SECONDS:
                path.unlink(missing_ok=True)
        is_present = bool(past) and past[-1][0] >= now - RENEW_SECONDS
        newest = past[-1][1] if is_present else self.folder / f"sealing-{int(now)}.key"
        return signed_keys(site, self.identity(), SealingKey(secret_key(newest)).public, weight)

    def _files(self) -> list[tuple[int, Path]]:
        """Return the files of sealing keys, each with the time in its name at which it was made."""
        found = ((path.stem.removeprefix("sealing-"), path) for path in self.folder.glob("sealing-*.key"))
        return [(int(created), path) for created, path in found if created.isdecimal()]


class _Agreed(Link):
    made: Commitment


class AgreementLog:
    """This helper's commitments under its long-term key: the sets of senders that it signed or opened, and the terms
    under which it signs none. A chain under the site's audit key."""

    def __init__(self, folder: Path, key: bytes = b"", identity: str = "") -> None:
        name = f"agreements {identity}".strip()
        self._keys = folder / KEYS_FOLDER
        self._chain: Chain[_Agreed] = Chain(StateDatabase.of(folder), name, _Agreed, key=key)
        self._known = 0
        """The least entries that the chain has."""

    def expect(self, signed: Mapping[Digest, tuple[str, int]]) -> None:
        """Raise ChainError unless the chain has these sets and abandoned terms, which the audit says were signed or
        opened, each with a run and a round.

        Without them the helper would sign a second set, whose difference from the first may be one site's update.
        """
        remedy = (
            f"Put the newest copy of the database back. If there is none, remove the folder {self._keys}: the site "
            "gets new keys, whose fingerprint (`tessera worker roster`) the other sites need"
        )
        try:
            entries = self._chain.read()
        except ChainError as fault:
            raise ChainError(str(fault).replace(ADOPT, remedy)) from None
        self._known = max(self._known, len(entries))
        found = {entry.made.senders or entry.made.terms for entry in entries}
        if lost := sorted(about for digest, about in signed.items() if digest not in found):
            run, number = lost[0]
            raise ChainError(
                f"{self._chain.where}: lacks {len(lost)} of this site's signatures and opened sums as a helper, "
                f"such as that of round {number} of run {run}. {remedy}"
            )

    def remember(self, made: Commitment, repeating: Collection[str] = ()) -> Commitment | None:
        """Record a commitment, on disk when it returns None; return an earlier one that forbids it.

        Raises ChainError if the chain was changed.
        """
        with self._chain.held() as chain:
            if len(chain.entries) < self._known:
                raise ChainError(f"{self._chain.where} was cut off or removed while the worker ran: put it back")
            known = [entry.made for entry in chain.entries]
            if made not in known:
                if earlier := forbidding(known, made, repeating):
                    return earlier
                at = datetime.now(UTC)
                chain.append(lambda seq, previous: _Agreed(seq=seq, at=at, previous=previous, made=made))
        self._known = len(chain.entries)
        return None


class Keys(Protocol):
    """The keys of a site."""

    def identity(self) -> SigningKey: ...
    def sealing_keys(self) -> Mapping[Hex32, SealingKey]: ...
    def public(self, site: str, weight: int = 1) -> SiteKeys: ...


@dataclass(frozen=True)
class SumParty:
    """This site in secure sums."""

    site: str
    keys: Keys
    roster: Mapping[str, str]
    """The fingerprints of the other sites' keys."""
    quorum: int
    """The least sites in a sum that this site sends to or opens."""
    helper: bool
    agreements: AgreementLog | None = field(repr=False)
    """Its signatures as a helper; None for another site."""
    masks: bool = True
    """False in a simulation: masks cancel to the bit, so that sums without them are the same."""
    noise_key: Callable[[int], bytes] = lambda _: new_noise_key()
    """Return the key of an update's noise by its task's seed. Only a simulation uses the seed, which others know."""
    weight: int = 1
    """Its weight in exact sums: one that a coordinator could change would be a known coefficient of its updates."""
    embeddings: bool = False
    """True if it sends rows of single tokens to exact sums."""

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of this site's key."""
        return fingerprint(self.keys.identity().public)
