"""What a coordinator could try to learn one site's update, and the rule that refuses each attempt.

In each case nothing is signed and no mask leaves a helper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from tessera.shared.schema import canonical
from tessera.shared.secure_sums.committee import is_abandoned, sender_set
from tessera.shared.secure_sums.envelope import PURPOSE, new_seeds
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SealingKey, SigningKey, require_signature
from tessera.shared.secure_sums.masks import MaskStream
from tessera.shared.secure_sums.messages import Agreement, Envelope, EnvelopeContents, Terms, fingerprint
from tessera.shared.secure_sums.roster import check_terms, signed_keys
from tessera.shared.tensors.lazy import digest_of
from tests.support.secure_sums import Federation, Sent, ring_of


def _steps(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"head": np.full(7, value, np.float32)}


class Round:
    """An honest round of six sites with four helpers, which a coordinator tampers with."""

    def __init__(self) -> None:
        self.federation = Federation(6, 4, quorum=5)
        self.terms = self.federation.terms()
        self.sent = [self.federation.send(self.terms, site, _steps()) for site in self.federation.names]

    @property
    def envelopes(self) -> list[Envelope]:
        return [each.envelope for each in self.sent]

    def agree(self, terms: Terms, envelopes: Sequence[Envelope], helper: str = "site-00") -> None:
        self.federation.member(helper).agree(terms, envelopes)

    def again(self, first: int, **changed: Any) -> None:
        """Have a set signed in which the sites from the number `first` on send again from the same model."""
        terms = self.federation.terms(values=self.terms.values, **changed)
        sent = [self.federation.send(terms, site, _steps()) for site in self.federation.names[first:]]
        self.agree(terms, [each.envelope for each in sent])

    def signed(self, **changed: Any) -> list[Envelope]:
        """Return the envelopes, with the last one changed and signed by its site."""
        *others, last = self.envelopes
        contents = EnvelopeContents(**{**last.model_dump(exclude={"signature"}), **changed})
        signature = self.federation.identities["site-05"].sign(PURPOSE, canonical(contents))
        return [*others, Envelope(**contents.model_dump(), signature=signature)]


def _ghosts(tried: Round) -> None:
    """Sites that the coordinator made up: one victim, and ghosts for the quorum."""
    fed = tried.federation
    for n in range(5):
        fed.identities[f"ghost-{n}"] = SigningKey.new()
    ghosts = [fed.send(tried.terms, f"ghost-{n}", _steps()) for n in range(5)]
    tried.agree(tried.terms, [tried.envelopes[0], *(ghost.envelope for ghost in ghosts)])


def _ghost_under_a_known_name(tried: Round) -> None:
    tried.federation.identities["site-05"] = SigningKey.new()
    tried.agree(tried.terms, [*tried.envelopes[:5], tried.federation.send(tried.terms, "site-05", _steps()).envelope])


def _one_site_twice(tried: Round) -> None:
    tried.agree(tried.terms, [*tried.envelopes[:4], tried.envelopes[3]])


def _one_key_under_two_names(tried: Round) -> None:
    fed = tried.federation
    fed.identities["site-05"] = fed.identities["site-04"]
    fed.roster["site-05"] = fed.roster["site-04"]
    again = fed.send(tried.terms, "site-05", _steps())
    tried.agree(tried.terms, [*tried.envelopes[:5], again.envelope])


def _too_few(tried: Round) -> None:
    tried.agree(tried.terms, tried.envelopes[:4])


def _small_quorum_in_other_terms(tried: Round) -> None:
    tried.agree(tried.federation.terms(quorum=3), tried.envelopes[:3])


def _two_versions(tried: Round) -> None:
    """Everyone but the victim gets another version, so that the victim's share of the sum stands out."""
    fed = tried.federation
    other = fed.terms(version=digest_of(b"another version"))
    split = [fed.send(other, site, _steps()).envelope for site in fed.names[1:]]
    tried.agree(tried.terms, [tried.envelopes[0], *split])


def _other_scales(tried: Round) -> None:
    fed = tried.federation
    blocks = {name: block.model_copy(update={"exponent": 40}) for name, block in tried.terms.blocks.items()}
    other = fed.terms(blocks=blocks)
    tried.agree(other, [*(fed.send(other, site, _steps()).envelope for site in fed.names[1:]), tried.envelopes[0]])


def _replayed_envelope(tried: Round) -> None:
    tried.agree(tried.federation.terms(2), tried.envelopes)


def _weight_changed(tried: Round) -> None:
    tried.agree(tried.terms, [tried.envelopes[0].model_copy(update={"weight": 999}), *tried.envelopes[1:]])


def _blocks_changed(tried: Round) -> None:
    tried.agree(tried.terms, [tried.envelopes[0].model_copy(update={"blocks": "7"}), *tried.envelopes[1:]])


def _update_changed(tried: Round) -> None:
    other = digest_of(b"other")
    tried.agree(tried.terms, [tried.envelopes[0].model_copy(update={"update": other}), *tried.envelopes[1:]])


def _seeds_of_another(tried: Round) -> None:
    """A colluding site sends the victim's sealed seeds as its own, to have the victim's masks subtracted twice."""
    tried.agree(tried.terms, tried.signed(seeds=tried.envelopes[0].seeds))


def _more_weight_than_the_terms_allow(tried: Round) -> None:
    tried.agree(tried.terms, tried.signed(weight=tried.terms.max_weight + 1))


def _a_block_that_the_terms_lack(tried: Round) -> None:
    tried.agree(tried.terms, tried.signed(blocks="9"))


def _set_less_one(tried: Round) -> None:
    tried.agree(tried.terms, tried.envelopes)
    tried.agree(tried.terms, tried.envelopes[1:])


def _less_one_in_another_run(tried: Round) -> None:
    tried.agree(tried.terms, tried.envelopes)
    tried.again(1, run="run-2", round=5)


def _all_in_another_run(tried: Round) -> None:
    """With other weights or settings, the sums of several runs are equations about each site's update."""
    tried.agree(tried.terms, tried.envelopes)
    tried.again(0, run="run-2", settings=digest_of(b"another learning rate"))


def _all_in_another_round(tried: Round) -> None:
    """One version under two numbers."""
    tried.agree(tried.terms, tried.envelopes)
    tried.again(0, round=2)


def _less_one_with_hardly_any_noise(tried: Round) -> None:
    fed = tried.federation
    for number, first in ((1, 0), (2, 1)):
        terms = fed.noisy_terms(epsilon=1000.0, run=f"run-{number}")
        tried.agree(terms, [fed.send(terms, site, _steps()).envelope for site in fed.names[first:]])


def _repetition_less_one(tried: Round) -> None:
    """The operators of those that send again allowed it, and not that of the site that is missing."""
    tried.agree(tried.terms, tried.envelopes)
    tried.again(1, run="run-2", repeat_model=True)


def _repetition_in_which_one_lacks_a_block(tried: Round) -> None:
    fed = tried.federation
    steps = {"head": _steps()["head"], "layer.0.value": np.ones(33, np.float32)}
    first, second = fed.terms(), fed.terms(run="run-2", repeat_model=True)
    tried.agree(first, [fed.send(first, site, steps).envelope for site in fed.names])
    lacking = [fed.send(second, fed.names[0], _steps()), *(fed.send(second, site, steps) for site in fed.names[1:])]
    tried.agree(second, [each.envelope for each in lacking])


def _set_of_an_abandoned_attempt(tried: Round) -> None:
    """The sites have sent other updates in the next attempt, since nothing of this one is opened."""
    tried.federation.member("site-00").abandon("run-1", 1, tried.terms.digest, 0)
    tried.agree(tried.terms, tried.envelopes)


def _abandonment_of_a_signed_set(tried: Round) -> None:
    tried.agree(tried.terms, tried.envelopes)
    tried.federation.member("site-00").abandon("run-2", 1, tried.terms.digest, 0)


def _foreign_helper(tried: Round) -> None:
    """The coordinator puts itself into the committee in place of a site."""
    own = signed_keys("site-01", SigningKey.new(), SealingKey.new().public)
    helpers = (tried.terms.helpers[0], own, *tried.terms.helpers[2:])
    tried.agree(tried.federation.terms(helpers=helpers), tried.envelopes)


def _one_helper_under_two_names(tried: Round) -> None:
    """A roster with one key under two names: its owner would sign for two helpers."""
    fed, own = tried.federation, tried.terms.helpers[1]
    fed.roster["site-02"] = fed.roster["site-01"]
    twice = signed_keys("site-02", fed.identities["site-01"], SealingKey.new().public)
    tried.agree(fed.terms(helpers=(tried.terms.helpers[0], own, twice, tried.terms.helpers[3])), tried.envelopes)


def _seeds_of_a_wrong_length(tried: Round) -> None:
    tried.agree(tried.terms, tried.signed(seeds=("", *tried.envelopes[5].seeds[1:])), "site-01")


def _foreign_sealing_key(tried: Round) -> None:
    """A helper's name and identity, with a key of the coordinator's to seal to."""
    own = tried.terms.helpers[1].model_copy(update={"sealing_key": SealingKey.new().public})
    helpers = (tried.terms.helpers[0], own, *tried.terms.helpers[2:])
    tried.agree(tried.federation.terms(helpers=helpers), tried.envelopes)


def _more_than_fit(tried: Round) -> None:
    fed = tried.federation
    terms = fed.terms(max_senders=5)
    tried.agree(terms, [fed.send(terms, site, _steps()).envelope for site in fed.names])


ACTS: dict[str, tuple[Callable[[Round], None], str]] = {
    "ghosts": (_ghosts, "not-in-roster"),
    "a ghost under a known name": (_ghost_under_a_known_name, "not-in-roster"),
    "one site twice": (_one_site_twice, "duplicate-site"),
    "one key under two names": (_one_key_under_two_names, "duplicate-site"),
    "too few senders": (_too_few, "quorum"),
    "a small quorum": (_small_quorum_in_other_terms, "quorum"),
    "two versions": (_two_versions, "terms-differ"),
    "scales that differ": (_other_scales, "terms-differ"),
    "an envelope of another round": (_replayed_envelope, "terms-differ"),
    "a weight that was changed": (_weight_changed, "signature"),
    "blocks that were changed": (_blocks_changed, "signature"),
    "an update that was exchanged": (_update_changed, "signature"),
    "the seeds of another": (_seeds_of_another, "seeds"),
    "a set less one": (_set_less_one, "already-agreed"),
    "a set less one in another run": (_less_one_in_another_run, "already-agreed"),
    "a set less one with hardly any noise": (_less_one_with_hardly_any_noise, "already-agreed"),
    "the same set in another run": (_all_in_another_run, "already-agreed"),
    "the same set in another round": (_all_in_another_round, "already-agreed"),
    "a repetition without one": (_repetition_less_one, "already-agreed"),
    "a repetition in which one lacks a block": (_repetition_in_which_one_lacks_a_block, "already-agreed"),
    "a set of an abandoned attempt": (_set_of_an_abandoned_attempt, "already-agreed"),
    "abandonment of a signed set": (_abandonment_of_a_signed_set, "already-agreed"),
    "a helper of its own": (_foreign_helper, "not-in-roster"),
    "a sealing key of its own": (_foreign_sealing_key, "signature"),
    "one helper under two names": (_one_helper_under_two_names, "committee"),
    "more weight than the terms allow": (_more_weight_than_the_terms_allow, "scales"),
    "a block that the terms lack": (_a_block_that_the_terms_lack, "malformed"),
    "seeds of a wrong length": (_seeds_of_a_wrong_length, "seeds"),
    "more senders than fit": (_more_than_fit, "too-many-senders"),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_helper_refuses(name: str) -> None:
    act, rule = ACTS[name]
    with pytest.raises(SumRefused) as refusal:
        act(Round())
    assert refusal.value.rule == rule


def test_a_site_under_two_keys_is_refused_without_a_roster_too() -> None:
    tried = Round()
    tried.federation.identities["site-00"] = SigningKey.new()
    again = tried.federation.send(tried.terms, "site-00", _steps()).envelope
    with pytest.raises(SumRefused, match="duplicate-site: a site occurs twice"):
        sender_set(tried.terms, [*tried.envelopes, again])


def test_a_signature_for_one_purpose_is_none_for_another() -> None:
    key = SigningKey.new()
    signature = key.sign("one purpose", b"message")
    require_signature(key.public, "one purpose", b"message", signature, "site-00")
    for purpose, message in (
        ("another purpose", b"message"),
        ("one purpose", b"another message"),
        ("one", b"message"),
    ):
        with pytest.raises(SumRefused, match="signature"):
            require_signature(key.public, purpose, message, signature, "site-00")


def test_the_seeds_of_an_update_are_all_different_and_new_each_time() -> None:
    terms = Federation(7, 7).terms()
    assert len({*new_seeds(terms), *new_seeds(terms)}) == 2 * len(terms.seeds) == 42


def test_a_seed_masks_each_block_of_each_round_differently() -> None:
    """Equal masks would cancel in a difference, and leave that of two steps."""

    def mask(terms: Terms, block: str) -> bytes:
        total = np.zeros(8, np.uint32)
        MaskStream([bytes(32)], terms.digest, block, 32).add_to(total)
        return total.tobytes()

    federation = Federation(6, 4)
    places = [(federation.terms(number), block) for number in (1, 2) for block in ("head", "layer.0.value")]
    assert len({mask(terms, block) for terms, block in places}) == 4
    assert mask(*places[0]) == mask(*places[0])


def test_a_refusal_of_seeds_names_their_sender() -> None:
    with pytest.raises(SumRefused, match="seeds: a message of site-05 was not sealed to this key"):
        _seeds_of_another(Round())


def test_sums_that_tell_nothing_by_their_difference_are_signed() -> None:
    """Of other sites, of all sites again if all operators allow it, and with noise that hides a site."""
    tried = Round()
    tried.agree(tried.terms, tried.envelopes)
    tried.again(0, run="run-2", repeat_model=True)
    tried.again(0, run="run-3", repeat_model=True)
    fed = tried.federation = Federation(12, 4, quorum=5)
    for run, sites in (("run-1", fed.names[:6]), ("run-2", fed.names[6:])):
        terms = fed.terms(run=run)
        tried.agree(terms, [fed.send(terms, site, _steps()).envelope for site in sites])
    for number in (1, 2):
        terms = fed.noisy_terms(run=f"noisy-{number}")
        tried.agree(terms, [fed.send(terms, site, _steps()).envelope for site in fed.names[number:]])


def test_an_attempt_is_abandoned_once_so_many_helpers_sign_that_no_set_of_it_is_opened() -> None:
    """Those that are left are too few to sign a set, even with all that may cheat."""
    tried = Round()
    fed, former = tried.federation, tried.terms.digest
    keys = [helper.identity for helper in tried.terms.helpers]
    signed = [fed.member(name).abandon("run-1", 1, former, n) for n, name in enumerate(fed.sealing)]

    def holds(*agreements: Agreement, of: str = former, helpers: Sequence[str] = keys) -> bool:
        return is_abandoned(of, helpers, fed.terms(attempt=2, abandoned={former: agreements}))

    assert holds(*signed)
    assert holds(*signed[:3])
    assert not holds(*signed[:2])
    assert not holds(*signed[:2], signed[0], signed[1].model_copy(update={"helper": 2}))
    assert not holds(*signed, of=digest_of(b"other terms"))
    # Nor if other helpers could open it.
    assert not holds(*signed, helpers=[SigningKey.new().public for _ in range(3)])
    # A signature under a set is another one.
    other = Round()
    agreed = other.federation.agreements(other.terms, other.sent, other.federation.sealing)
    disguised = [one.model_copy(update={"senders": other.terms.digest}) for one in agreed]
    terms = other.federation.terms(attempt=2, abandoned={other.terms.digest: disguised})
    assert not is_abandoned(other.terms.digest, [helper.identity for helper in terms.helpers], terms)


def _opened(
    tried: Round, sent: list[Sent], agreed: list, seeds: Sequence[int] = (1,), helper: str = "site-00"
) -> bytes:
    file = BytesIO()
    envelopes = [each.envelope for each in sent]
    tried.federation.member(helper).open(tried.terms, envelopes, agreed, seeds, file)
    return file.getvalue()


def test_two_sets_for_two_groups_of_helpers_are_never_both_opened() -> None:
    tried = Round()
    fed, less = tried.federation, tried.sent[1:]
    whole = fed.agreements(tried.terms, tried.sent, ["site-00", "site-01"])
    part = fed.agreements(tried.terms, less, ["site-02", "site-03"])
    for sent, agreed in ((tried.sent, whole), (less, part), (tried.sent, whole + part), (less, whole + part)):
        for helper in fed.sealing:
            with pytest.raises(SumRefused, match="too-few-signatures"):
                _opened(tried, sent, agreed, helper=helper)


def test_a_signature_counts_once() -> None:
    tried = Round()
    agreed = tried.federation.agreements(tried.terms, tried.sent, ["site-01", "site-02"])
    copied = agreed[0].model_copy(update={"helper": 3})
    with pytest.raises(SumRefused, match="too-few-signatures"):
        _opened(tried, tried.sent, [*agreed, *agreed])
    with pytest.raises(SumRefused, match="signature"):
        _opened(tried, tried.sent, [*agreed, copied])


def test_a_helper_that_opened_a_set_signs_no_other() -> None:
    tried = Round()
    agreed = tried.federation.agreements(tried.terms, tried.sent, ["site-01", "site-02", "site-03"])
    assert _opened(tried, tried.sent, agreed)
    with pytest.raises(SumRefused, match="already-agreed"):
        tried.agree(tried.terms, tried.envelopes[1:])


def test_a_helper_opens_no_seed_that_it_lacks() -> None:
    tried = Round()
    agreed = tried.federation.agreements(tried.terms, tried.sent, ["site-01", "site-02", "site-03"])
    for seeds in ([0], [0, 1], [99], [-1]):
        with pytest.raises(SumRefused, match="seeds"):
            _opened(tried, tried.sent, agreed, seeds)


def test_what_helpers_return_is_a_sum_of_masks_and_no_mask_of_one_site() -> None:
    tried = Round()
    agreed = tried.federation.agreements(tried.terms, tried.sent, ["site-01", "site-02", "site-03"])
    files = tried.federation.mask_sums(tried.terms, tried.sent, agreed, ["site-00", "site-02"])
    masks = sum(next(ring_of(file, tried.terms, ["head"])["head"].chunks()).astype(np.int64) for file in files)
    for each in tried.sent:
        alone = next(each.ring(tried.terms)["head"].chunks()).astype(np.int64) - masks
        assert np.abs(alone.astype(np.int32)).max() > 1 << 20


def test_a_helper_s_key_to_which_nothing_can_be_sealed_is_named() -> None:
    federation = Federation(6, 4)
    broken = signed_keys("site-01", federation.identities["site-01"], "00" * 32)
    terms = federation.terms(helpers=(federation.terms().helpers[0], broken, *federation.terms().helpers[2:]))
    with pytest.raises(SumRefused, match="committee: nothing can be sealed to the key of site-01"):
        federation.send(terms, "site-02", _steps())


def test_a_site_trains_for_no_committee_that_its_roster_lacks() -> None:
    tried = Round()
    check_terms(tried.terms, tried.federation.roster, 5)
    for roster in ({}, {**tried.federation.roster, "site-03": fingerprint(SigningKey.new().public)}):
        with pytest.raises(SumRefused, match="not-in-roster"):
            check_terms(tried.terms, roster)
    with pytest.raises(SumRefused, match="quorum"):
        check_terms(tried.terms, tried.federation.roster, 6)
    twice = tried.terms.helpers[1].model_copy(update={"site": "site-04"})
    with pytest.raises(SumRefused, match="not-in-roster"):
        check_terms(tried.federation.terms(helpers=(*tried.terms.helpers[:3], twice)), tried.federation.roster)
