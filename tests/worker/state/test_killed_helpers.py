"""Helpers that are killed anywhere sign and open one set of senders for a round: their memory of it is on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np
import pytest

from tessera.shared.secure_sums.committee import Commitment, Member, is_abandoned
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SigningKey
from tessera.shared.secure_sums.messages import Agreement, Terms, share_out
from tessera.worker.state.site_keys import AgreementLog
from tests.support.secure_sums import Disk, Federation, Sent, integers_of, steps_of

T = TypeVar("T")

AUDIT_KEY = b"k" * 32
STEPS = 14
"""At least as many as an act of a helper has."""
COLLUDING = "site-03"
"""A helper on the coordinator's side, which signs whatever it is asked to."""


class Killed(Exception):
    """The end of a helper's process."""


@dataclass
class Life:
    """The steps that are left to a process, and the step at which it ended."""

    left: int
    at: str = ""

    def step(self, name: str) -> None:
        if not self.left:
            self.at = name
            raise Killed
        self.left -= 1


@dataclass(frozen=True)
class MortalLog:
    log: AgreementLog
    life: Life

    def remember(self, made: Commitment, repeating: Collection[str] = ()) -> Commitment | None:
        self.life.step("before remember")
        found = self.log.remember(made, repeating)
        self.life.step("after remember")
        return found


@dataclass(frozen=True)
class MortalKey(SigningKey):
    life: Life
    signed: set[str]
    """The sets that were ever signed, also if the signature was lost."""

    def sign(self, purpose: str, message: bytes) -> str:
        self.life.step("before sign")
        signature = super().sign(purpose, message)
        self.signed.add(message.decode())
        self.life.step("after sign")
        return signature


@dataclass
class MortalFile:
    life: Life
    written: BytesIO = field(default_factory=BytesIO)

    def write(self, chunk: bytes) -> int:
        self.life.step("before write")
        count = self.written.write(chunk)
        self.life.step("after write")
        return count


@dataclass
class Helper:
    """A helper with a folder, in which alone it remembers."""

    federation: Federation
    site: str
    folder: Path
    dice: Random
    ends: Counter[str] = field(default_factory=Counter)
    """How often a process ended at each step."""
    signed: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)

    def _until_done(self, act: Callable[[Member, Life], T]) -> T:
        """Start a process for the act, and another one that does it again if the first is killed."""
        while True:
            life = Life(self.dice.randrange(STEPS))
            member = Member(
                self.site,
                MortalKey(self.federation.identities[self.site].secret, life, self.signed),
                {self.federation.sealing[self.site].public: self.federation.sealing[self.site]},
                self.federation.roster,
                MortalLog(AgreementLog(self.folder, AUDIT_KEY), life),
                self.federation.quorum,
            )
            try:
                return act(member, life)
            except Killed:
                self.ends[life.at] += 1

    def agree(self, terms: Terms, sent: Sequence[Sent]) -> Agreement:
        return self._until_done(lambda member, _: member.agree(terms, [each.envelope for each in sent]))

    def abandon(self, terms: Terms) -> Agreement:
        number = self.federation.names.index(self.site)
        return self._until_done(lambda member, _: member.abandon(terms.run, terms.round, terms.digest, number))

    def open(self, terms: Terms, sent: Sequence[Sent], agreed: Sequence[Agreement], seeds: Sequence[int]) -> bytes:
        """Return what was written, and note the set, of which a part may have been sent."""

        def act(member: Member, life: Life) -> bytes:
            file = MortalFile(life)
            try:
                member.open(terms, [each.envelope for each in sent], agreed, seeds, file)
            finally:
                if file.written.tell():
                    self.opened.add(self.federation.sender_set(terms, sent).digest)
            return file.written.getvalue()

        return self._until_done(act)


def attempt(act: Callable[[], T]) -> T | None:
    """Return what a helper does, or None if it refuses, which it does for these reasons alone."""
    try:
        return act()
    except SumRefused as refusal:
        if refusal.rule not in ("already-agreed", "too-few-signatures"):
            raise
        return None


def opened_round(federation: Federation, helpers: Sequence[Helper], number: int, dice: Random) -> bool:
    """Ask for signatures under three sets of a round, and for the sum of each; return whether one was opened."""
    terms = federation.terms(number)
    steps = {site: steps_of(dice) for site in federation.names}
    sent = [federation.send(terms, site, steps[site]) for site in federation.names]
    # A set less one, and one with a second envelope of a site.
    sets = [sent, sent[:-1], [*sent[:-1], federation.send(terms, federation.names[-1], steps_of(dice))]]
    digests = [federation.sender_set(terms, each).digest for each in sets]
    agreed: list[list[Agreement]] = [[] for _ in sets]
    for helper in dice.sample(helpers, len(helpers) - (dice.random() < 0.5)):
        for chosen in [*([0] if dice.random() < 0.8 else []), *dice.sample(range(3), 3)]:
            agreed[chosen] += [made] if (made := attempt(lambda h=helper, c=chosen: h.agree(terms, sets[c]))) else []
    for chosen, each in enumerate(sets):
        federation.disks[COLLUDING] = Disk()
        agreed[chosen] += federation.agreements(terms, each, [COLLUDING])
    found = {}
    for chosen in dice.sample(range(3), 3):
        opening = sorted(dice.sample(range(3), terms.tolerance + 1))
        shares = share_out(len(terms.helpers), opening)
        files = [
            attempt(lambda h=helpers[n], c=chosen, s=seeds: h.open(terms, sets[c], agreed[c], s))
            for n, seeds in shares.items()
        ]
        if None not in files:
            found[chosen] = federation.opened(terms, sets[chosen], [file for file in files if file])
    # What one helper has signed or opened is one set, and so is what all honest helpers have opened.
    own = [{*helper.signed, *helper.opened} & {*digests} for helper in helpers]
    assert all(len(each) <= 1 for each in own), (number, own)
    assert len(set().union(*(helper.opened & {*digests} for helper in helpers))) <= 1
    assert len(found) <= 1
    for chosen, total in found.items():
        if chosen < 2:
            plain = [integers_of(terms, steps[each.envelope.site], 10, 0) for each in sets[chosen]]
            for name, values in total.items():
                assert np.array_equal(values, sum(one[name].astype(np.int64) for one in plain))
    return bool(found)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_helpers_that_are_killed_anywhere_open_one_set_of_a_round(tmp_path: Path, seed: int) -> None:
    dice = Random(seed)
    federation = Federation(6, 4)
    helpers = [Helper(federation, site, tmp_path / site, dice) for site in federation.names[:3]]
    opened = sum(opened_round(federation, helpers, number, dice) for number in range(1, 21))
    assert 5 < opened < 20
    ends = sum((helper.ends for helper in helpers), Counter())
    acts = ("remember", "sign", "write")
    assert set(ends) == {f"{when} {act}" for when in ("before", "after") for act in acts}
    assert min(ends.values()) > 3


def tried_attempts(federation: Federation, helpers: Sequence[Helper], number: int, dice: Random) -> tuple[bool, ...]:
    """Ask helpers in any order to sign a set of one attempt, to abandon it, and to sign one of a later attempt or
    run; return whether the first is proven to be abandoned, and whether each is opened."""
    first = federation.terms(number)
    attempts = (first, federation.terms(number, attempt=2, run=dice.choice(["run-1", "run-2"])))
    sent = [[federation.send(terms, site, steps_of(dice)) for site in federation.names] for terms in attempts]
    agreed: list[list[Agreement]] = [[], []]
    signed: list[Agreement] = []
    for helper in dice.sample(helpers, len(helpers)):
        for act in dice.sample((0, 1, 2), 3):
            if act == 2:
                signed += [made] if (made := attempt(lambda h=helper: h.abandon(first))) else []
            elif made := attempt(lambda h=helper, n=act: h.agree(attempts[n], sent[n])):
                agreed[act].append(made)
    opened = []
    for terms, each, own in zip(attempts, sent, agreed, strict=True):
        federation.disks[COLLUDING] = Disk()
        own.extend(federation.agreements(terms, each, [COLLUDING]))
        files = [
            attempt(lambda h=helpers[n], s=seeds, t=terms, e=each, a=own: h.open(t, e, a, s))
            for n, seeds in share_out(len(terms.helpers), [0, 1]).items()
        ]
        opened.append(None not in files)
    federation.disks[COLLUDING] = Disk()
    signed.append(federation.member(COLLUDING).abandon("run-1", number, first.digest, 3))
    later = federation.terms(number, attempt=2, abandoned={first.digest: signed})
    is_proven = is_abandoned(first.digest, [helper.identity for helper in first.helpers], later)
    digests = [federation.sender_set(terms, each).digest for terms, each in zip(attempts, sent, strict=True)]
    for helper in helpers:
        bound = helper.signed | helper.opened
        assert len(bound & {*digests}) <= 1
        assert len(bound & {digests[0], first.digest}) <= 1
    assert is_proven + opened[0] <= 1
    assert sum(opened) <= 1
    return (is_proven, *opened)


def test_helpers_that_are_killed_anywhere_open_no_attempt_that_is_proven_to_be_abandoned(tmp_path: Path) -> None:
    dice = Random(0)
    federation = Federation(6, 4)
    helpers = [Helper(federation, site, tmp_path / site, dice) for site in federation.names[:3]]
    found = Counter(tried_attempts(federation, helpers, number, dice) for number in range(1, 31))
    assert {(True, False, True), (False, True, False)} < set(found), found
    ends = sum((helper.ends for helper in helpers), Counter())
    assert min(ends[f"{when} {act}"] for when in ("before", "after") for act in ("remember", "sign")) > 3
