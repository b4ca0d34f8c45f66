"""Some thousands of the hostile updates that `make fuzz` makes a million of."""

from __future__ import annotations

from tests.fuzz import BLOCKS, CODECS, case, outcome, put_together, run, seeds


def test_thousands_of_spoilt_updates_are_refused_or_read_to_their_end() -> None:
    found = run(4000, seed=1)
    # So that it goes on to reach all parts of the format.
    assert len(found) >= 38
    assert found["taken"] > 100
    assert "" not in found


def test_what_is_spoilt_was_well_formed() -> None:
    files = seeds()
    assert len(files) == len(CODECS)
    assert all(set(file.parts) == set(BLOCKS) for file in files)
    assert {outcome(put_together(file)) for file in files} == {"taken"}


def test_a_case_follows_from_its_seed_and_number() -> None:
    files = seeds()
    assert case(files, 7, 123) == case(seeds(), 7, 123) != case(files, 8, 123)
