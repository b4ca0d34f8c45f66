"""The check of plain English finds what it is for, and lets plain English pass."""

from __future__ import annotations

import pytest

from tests.prose import stopped


@pytest.mark.parametrize(
    "text",
    [
        "What a worker is told.",
        "Handed in twice.",
        "It came to nothing",
        "whoever calls",
        "So many requests a second",
    ],
)
def test_a_word_of_the_stop_list_is_found_in_every_form(text: str) -> None:
    assert len(list(stopped(text))) == 1


@pytest.mark.parametrize("text", ["Return the stellar mass.", "A bearer token.", "retold", "Renew the lease."])
def test_words_that_only_contain_one_pass(text: str) -> None:
    assert not list(stopped(text))
