"""What the coordinator checks of a masked update on arrival."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from tessera.shared.problems import InvalidUpdate
from tessera.shared.rounds.secure_sums import check_masked
from tessera.shared.secure_sums.envelope import make_envelope, new_seeds
from tessera.shared.secure_sums.keys import SigningKey
from tessera.shared.tensors.lazy import digest_of
from tests.support.secure_sums import SIZES, Federation

STEPS = {name: np.ones(size, np.float32) for name, size in SIZES.items()}


class Arrival:
    """A masked update of site-01, as its submission has it."""

    def __init__(self) -> None:
        self.federation = Federation(3, 3)
        self.terms = self.federation.terms()
        sent = self.federation.send(self.terms, "site-01", STEPS)
        self.file = sent.file
        self.right: dict[str, Any] = {
            "text": sent.envelope.model_dump_json(),
            "terms": self.terms,
            "site": "site-01",
            "weight": 10,
            "update": digest_of(sent.file),
            "asked": list(SIZES),
            "data": sent.file,
            "identity": self.federation.identities["site-01"].public,
        }

    def check(self, **changed: Any) -> tuple[str, ...]:
        # The update's bytes are here, so that no store is read.
        return check_masked(**{**self.right, **changed}, blobs=cast("Any", None))[1]


def test_an_update_that_is_as_its_envelope_says_is_accepted() -> None:
    assert Arrival().check() == tuple(sorted(SIZES))


def test_a_file_of_another_round_is_refused() -> None:
    arrival = Arrival()
    terms, key = arrival.terms, arrival.federation.identities["site-01"]
    file = arrival.federation.send(arrival.federation.terms(2), "site-01", STEPS).file
    envelope = make_envelope(terms, "site-01", key, 10, list(SIZES), digest_of(file), new_seeds(terms))
    with pytest.raises(InvalidUpdate, match="terms-differ: the file is of other terms"):
        arrival.check(text=envelope.model_dump_json(), update=digest_of(file), data=file)


def test_another_than_its_envelope_says_is_refused() -> None:
    arrival = Arrival()
    other = arrival.federation.send(arrival.terms, "site-02", STEPS)
    fewer = arrival.federation.send(arrival.terms, "site-01", {"head": STEPS["head"]})
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"text": None}, "required, but missing"),
        ({"text": "not JSON"}, "Invalid JSON"),
        ({"text": "[" * 10_000}, "recursion limit"),
        ({"text": '{"terms": [1], "seeds": 7}'}, "must be text"),
        ({"text": other.envelope.model_dump_json()}, "another site or another update"),
        ({"site": "site-02"}, "another site or another update"),
        ({"update": digest_of(b"other")}, "another site or another update"),
        ({"weight": 9}, "its weight is 10; its worker declares 9"),
        ({"terms": arrival.federation.terms(2)}, "terms-differ"),
        ({"asked": ["head"]}, "the plan does not ask for"),
        ({"data": other.file[:-1]}, "well-formed"),
        ({"data": fewer.file}, "blocks are missing"),
        ({"data": b""}, "well-formed"),
        ({"identity": SigningKey.new().public}, "under another key"),
    )
    for changed, said in wrong:
        with pytest.raises(InvalidUpdate, match=said) as refusal:
            arrival.check(**changed)
        assert refusal.value.errors[0].code == "envelope-unusable"
