"""Agreement of a text with the right text."""

import re

NO_WORD = re.compile(r"[^a-z0-9]+")


def is_same(made: str, right: str) -> bool:
    """Return True if two texts are equal but for white space."""
    return made.split() == right.split()


def rouge_l(made: str, right: str) -> float:
    """Return the F1 of the longest common subsequence of words (Lin 2004, "ROUGE", section 3), from 0 to 1.

    As in rouge-score without stemming, words are runs of a to z and 0 to 9 in lower case, and of a text without words
    it is 0.
    """
    first, second = ([word for word in NO_WORD.split(text.lower()) if word] for text in (made, right))
    if not first or not second:
        return 0.0
    return 2 * _common_length(first, second) / (len(first) + len(second))


def _common_length(first: list[str], second: list[str]) -> int:
    """Return the length of the longest common subsequence, by a bit for each word of the first (Hyyro 2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    every = (1 << len(first)) - 1
    row = every
    for word in second:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & every
    return len(first) - row.bit_count()
