"""Exact match, and ROUGE-L beside that of rouge-score."""

from __future__ import annotations

import pytest

from tessera.worker.scores.text_overlap import is_same, rouge_l

# rouge-score 0.1.2: rouge_scorer.RougeScorer(["rougeL"]).score(right, made)["rougeL"].fmeasure
FIGURES = [
    ("The dose is 100 mg a day.", "the dose: 100mg, a day", 0.6666666666666666),
    ("police killed the gunman", "the gunman kill police", 0.5),
    ("yes", "Yes!", 1.0),
    ("no", "yes", 0.0),
    ("", "yes", 0.0),
    ("...", "...", 0.0),
    ("a b c d e f", "b d f a c e", 0.5),
    ("take two tablets in the morning", "in the morning take two tablets with water", 0.42857142857142855),
    ("naïve café", "naive cafe", 0.0),
    ("don't stop_now", "dont stop now", 0.5714285714285715),
]


@pytest.mark.parametrize(("right", "made", "expected"), FIGURES)
def test_rouge_l_is_that_of_rouge_score(right: str, made: str, expected: float) -> None:
    assert rouge_l(made, right) == pytest.approx(expected, abs=1e-12)


def test_rouge_l_of_long_texts_takes_no_table_of_their_words() -> None:
    right = "a b c " * 100_000
    # 1,000 of 300,000 words.
    assert rouge_l("a c " * 500, right) == pytest.approx(2 * 1000 / 301_000)


def test_texts_are_the_same_but_for_white_space() -> None:
    assert is_same(" 100 mg\n a day ", "100 mg a day")
    assert not is_same("100 mg a Day", "100 mg a day")
