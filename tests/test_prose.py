"""The check of plain English finds what it is for, and lets plain English pass."""

from __future__ import annotations

import pytest

from tests.prose import dangling, stopped


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


@pytest.mark.parametrize(
    "text",
    [
        "Return what an event costs.",
        "Return whether it is due.",
        "Multiply it by what the site declares.",
        "Return the state of the accepted task, or of the one before.",
        "The blocks. Those of small tensors share memory.",
        "A batch of which the losses do not add up.",
        "Raise ValueError for a body that is none.",
        "Hash all that the worker sends.",
        "Fetch it. What was fetched is read.",
    ],
)
def test_a_pronoun_or_clause_in_the_place_of_a_noun_is_found(text: str) -> None:
    assert len(list(dangling(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Return True if it is due.",
        "None if there is none.",
        "The site's examples, each of which counts once.",
        "What is next? A round.",
        "Reveal the one-shot call.",
        "It is larger than that of the median.",
    ],
)
def test_a_pronoun_or_clause_with_a_clear_noun_passes(text: str) -> None:
    assert not list(dangling(text))
