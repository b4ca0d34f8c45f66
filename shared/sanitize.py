"""Texts of others, made fit to be shown."""

import re
from typing import TypeVar

T = TypeVar("T")

KEPT = "\n\t\u00a0\u202f\u2009"
"""Line ends, tabs and spaces that count as not printable."""

FORMULA = re.compile(
    r"""
    ((?:^ | [,;|\t\r\n]) [ "]*+)  # the beginning of a text, or a place where a spreadsheet may split a line
    (?= [=+\-@])
    (?! [+-]? (?:\d+ (?:\.\d*)? | \.\d+) (?:[eE][+-]?\d+)? [ "\]}]*+ (?:[,;|\t\r\n] | \Z))  # no number
    """,
    re.VERBOSE,
)

SUSPECT = re.compile(r"[^ -~\n\t]")
"""Few characters of a page are: a look at each of the others takes long."""


def fit_to_show(value: T) -> T | str:
    """Return a text with a replacement character for each character in it that is not to be seen: that begins an
    escape sequence, say, or has what follows shown from right to left. Return any other value as it is."""
    if not isinstance(value, str) or value.isprintable():
        return value
    # Markup stays markup.
    return type(value)(SUSPECT.sub(_fit, value))


def _fit(found: re.Match[str]) -> str:
    letter = found.group()
    return letter if letter.isprintable() or letter in KEPT else "\ufffd"


def no_formula(cell: T) -> T | str:
    """Return a cell of a table for spreadsheets, with a quotation mark before each part of a text that they would
    compute. Numbers stay as they are."""
    return FORMULA.sub(r"\1'", cell) if isinstance(cell, str) else cell


def fit_for_table(cell: T) -> T | str:
    """Return a cell of a table for spreadsheets without formulas and without characters that are not to be seen."""
    return fit_to_show(no_formula(cell))
