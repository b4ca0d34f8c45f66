"""Conversion of labels to a model's class numbers, which are the same at every site."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tessera.shared.near_names import composed, did_you_mean
from tessera.worker.errors import DataError

MAX_SHOWN = 8
MAX_CLASSES = 100_000
"""Limit on class numbers: a column with larger numbers does not contain classes."""
NO_VALUE = "no value"
TRUTH = frozenset({"True", "False", "TRUE", "FALSE", "true", "false"})
WHOLE = re.compile(r"^(-?[0-9]+)\.0+$")
"""A whole number that was written as a decimal one."""
LISTED = re.compile(r"\s*[\[({]\s*(['\"].*['\"],?|-?[0-9][0-9.,\s-]*)\s*[\])}]\s*", re.DOTALL)
"""A list, a tuple or a set that was written as text."""


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(map(composed, names))
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"named twice: {', '.join(twice[:MAX_SHOWN])}")
    return names


Names = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_CLASSES), AfterValidator(_each_once)]
"""The names of the classes, beginning with class 0."""


Absent = Names | Literal["any"]
"""The names of classes without an example at a site."""


def class_name(value: object) -> str | None:
    """Return the name of the class that a cell holds: a number without zeros after its point, since one missing value
    makes a column of numbers 0.0 and 1.0; `true` or `false`; other text as it is. None without a value. Raises
    TypeError for a list, a record or bytes."""
    if isinstance(value, list | tuple | dict | bytes):
        raise TypeError(value)
    if value is None or value == "" or value != value:
        return None
    text = composed(str(value))
    if text in TRUTH:
        return text.lower()
    if isinstance(value, float | Decimal) and value == value // 1:
        return str(int(value))
    return WHOLE.sub(r"\1", text)


@dataclass
class Numbering:
    """The class number of each value of a column, whose values come in batches."""

    option: str
    where: str
    names: Sequence[str] | None
    absent: Absent | None = None
    _present: set[int] = field(default_factory=set)
    _unknown: dict[str, list[int]] = field(default_factory=dict)
    """The number of rows with a value that is no class, and the first of them, by the value as it is shown."""
    _several: bool = False
    """True if a cell holds several values."""

    def __post_init__(self) -> None:
        """Raise DataError if two names, such as those in a table's own type, are one in another Unicode form."""
        self.names = self.names and tuple(map(composed, self.names))
        self._place = {name: number for number, name in enumerate(self.names or ())}
        if len(self._place) < len(self.names or ()):
            twice = [name for name, count in Counter(self.names).items() if count > 1]
            raise DataError(f"{self.option}: {self.where} has two classes of one name: {_listed(twice)}; rename one")
        for name, number in list(self._place.items()):
            self._place.setdefault(class_name(name) or name, number)
        self._by_number = not any(name.isdecimal() for name in self._place)

    def numbers(self, values: Iterable[object], rows: Iterable[int] | None = None) -> list[int]:
        """Return the class number of each value, and remember it for `check`. A value that is no class gives -1.

        A value among the names is that class; another integer is a class number, unless a name is an integer too.
        `rows` are the values' places in the table, by default those from 0 on.
        """
        found = []
        for row, value in zip(itertools.count() if rows is None else rows, values, strict=False):
            number = _number(value, self._place, by_number=self._by_number)
            if number is None:
                self._unknown.setdefault(_shown(value), [0, row])[0] += 1
                self._several |= isinstance(value, list | tuple) or bool(LISTED.fullmatch(str(value)))
            found.append(-1 if number is None else number)
        self._present.update(found)
        return found

    def check(self) -> None:
        """Raise DataError, naming the values, if some are no class, so that no site numbers classes in an order of
        its own; and if a name has no example and is not among `absent`: then files may be missing."""
        if not self._unknown:
            _require_examples(self.where, self._present, self.names or (), self.absent)
            return
        named = sorted(self._unknown.keys() - {NO_VALUE})
        missing, row = self._unknown.get(NO_VALUE, [0, 0])
        lacking = f"no value in {missing} row{'s' * (missing > 1)}, first in row {row}"
        found = f"{self.option}: {self.where} has {_listed(named) if named else lacking}"
        if not named:
            raise DataError(f"{found}: fill it in, or remove these rows")
        if self._several:
            found += '; give each example one class, or for several set problem_type = "multi_label"'
        elif self.names is None:
            found += "; list the classes' names in `labels`, the same at every site"
        else:
            found += f", not among the {len(self.names)} names in `labels`; correct it, or add it there"
        if self.option == "label":
            found += f". {named[0]} is first in row {self._unknown[named[0]][1]}"
        raise DataError(found + (f"; there is {lacking}" if missing else ""))


def numbered(
    option: str, where: str, values: Sequence[object], names: Sequence[str] | None, absent: Absent | None = None
) -> list[int]:
    """Return the class number of each value. Raises DataError as `Numbering.check`."""
    numbering = Numbering(option, where, names, absent)
    numbers = numbering.numbers(values)
    numbering.check()
    return numbers


def _require_examples(where: str, present: set[int], names: Sequence[str], absent: Absent | None) -> None:
    if absent == "any":
        return
    known, excused = set(names), set(absent or ())
    for name in absent or ():
        if name not in known:
            raise DataError(f"absent: {name!r} is not among the names in `labels`{did_you_mean(name, names)}")
    empty = [name for place, name in enumerate(names) if place not in present and name not in excused]
    if empty:
        consent = json.dumps([*(absent or ()), *empty] if len(empty) <= MAX_SHOWN else "any", ensure_ascii=False)
        raise DataError(
            f"labels: {where} has no example of {_listed(list(map(repr, empty)))}; add examples, or if this site has "
            f"none, set absent = {consent}"
        )


def _listed(shown: Sequence[str]) -> str:
    return ", ".join(shown[:MAX_SHOWN]) + (f" and {len(shown) - MAX_SHOWN} more" if shown[MAX_SHOWN:] else "")


def _number(value: object, place: dict[str, int], *, by_number: bool) -> int | None:
    if isinstance(value, str | int) and (exact := place.get(composed(str(value)))) is not None:
        return exact
    try:
        name = class_name(value)
    except TypeError:
        return None
    if name is None or name in place:
        return None if name is None else place[name]
    if isinstance(value, bool) or not by_number or not name.isdecimal():
        return None
    digits = name.lstrip("0") or "0"
    number = int(digits) if len(digits) < len(str(MAX_CLASSES)) else MAX_CLASSES
    return number if number < (len(place) or MAX_CLASSES) else None


def _shown(value: object) -> str:
    """Return a value as `labels` takes it."""
    try:
        name = class_name(value)
    except TypeError:
        return repr(value)[:60]
    return NO_VALUE if name is None else repr(name)[:60]


def combinations(names: Iterable[str]) -> list[str]:
    """Return the names that are probably several classes each: "edema|effusion", or a list written as text."""
    every = set(names)
    return sorted(name for name in every if LISTED.fullmatch(name) or any(_joined(name, every)))


def _joined(name: str, known: set[str]) -> Iterator[bool]:
    for mark in ";|,/+&":
        parts = [part.strip() for part in name.split(mark)]
        # Names contain a comma or a slash more often than they enumerate.
        yield len(parts) > 1 and all(parts) and (mark in ";|" or set(parts) <= known)
