"""Conversion of labels to a model's class numbers, which are the same at every site."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tessera.shared.near_names import did_you_mean
from tessera.worker.data.dataset import DataError

MAX_SHOWN = 8
MAX_CLASSES = 100_000
"""Limit on class numbers: a column with larger numbers does not contain classes."""


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"named twice: {', '.join(twice[:MAX_SHOWN])}")
    return names


Names = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_CLASSES), AfterValidator(_each_once)]
"""The names of the classes, beginning with class 0."""


Absent = Names | Literal["any"]
"""The names of classes of which a site has no example."""


@dataclass
class Numbering:
    """The class number of each value of a column, whose values come in batches."""

    option: str
    where: str
    names: Sequence[str] | None
    absent: Absent | None = None
    _present: set[int] = field(default_factory=set)
    _unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._place = {name: number for number, name in enumerate(self.names or ())}
        self._by_number = not any(name.isdecimal() for name in self._place)

    def numbers(self, values: Iterable[object]) -> list[int]:
        """Return the class number of each value, and remember it for `check`. A value that is no class gives -1.

        A value among the names is that class; another integer is a class number, unless a name is an integer too.
        """
        found = []
        for value in values:
            number = _number(value, self._place, by_number=self._by_number)
            if number is None:
                self._unknown.add(_shown(value))
            found.append(-1 if number is None else number)
        self._present.update(found)
        return found

    def check(self) -> None:
        """Raise DataError, naming the values, if some are no class, so that no site numbers classes in an order of
        its own; and if a name has no example and is not among `absent`: then files may be missing."""
        if not self._unknown:
            _require_examples(self.where, self._present, self.names or (), self.absent)
            return
        shown = _listed(sorted(self._unknown))
        found = f"{self.option}: {self.where} has {shown}"
        if self.names is None:
            raise DataError(f"{found}; list the classes' names in `labels`, the same at every site")
        raise DataError(f"{found}, not among the {len(self.names)} names in `labels`; correct it, or add it there")


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
    if isinstance(value, str | int) and str(value) in place:
        return place[str(value)]
    if isinstance(value, bool) or not by_number or not str(value).isdecimal():
        return None
    digits = str(value).lstrip("0") or "0"
    number = int(digits) if len(digits) < len(str(MAX_CLASSES)) else MAX_CLASSES
    return number if number < (len(place) or MAX_CLASSES) else None


def _shown(value: object) -> str:
    return "no value" if value is None or value == "" else repr(value)[:60]
