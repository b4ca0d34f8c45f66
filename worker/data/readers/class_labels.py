"""Conversion of labels to a model's class numbers, which are the same at every site."""

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tessera.shared.near_names import did_you_mean
from tessera.worker.data.dataset import DataError

MAX_SHOWN = 8
MAX_CLASSES = 100_000
"""Limit on class numbers: a column with larger numbers does not contain classes."""


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"named twice: {', '.join(twice[:MAX_SHOWN])}")
    return names


Names = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_CLASSES), AfterValidator(_each_once)]
"""The names of the classes, beginning with class 0."""


Absent = Names | Literal["any"]
"""The names of classes of which a site has no example."""


def numbered(
    option: str, where: str, values: Sequence[object], names: Sequence[str] | None, absent: Absent | None = None
) -> list[int]:
    """Return the class number of each value.

    A value among the names is that class; another integer is a class number, unless a name is an integer too. Raises
    DataError, naming the values, if some are neither, so that no site numbers classes in an order of its own. It also
    raises DataError if a name has no example and is not among `absent`: then files may be missing.
    """
    place = {name: number for number, name in enumerate(names or ())}
    by_number = not any(name.isdecimal() for name in place)
    numbers = [_number(value, place, by_number=by_number) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        _require_examples(where, set(known), names or (), absent)
        return known
    unknown = sorted({_shown(value) for value, number in zip(values, numbers, strict=True) if number is None})
    shown = _listed(unknown)
    if names is None:
        raise DataError(f"{option}: {where} has {shown}; list the classes' names in `labels`, the same at every site")
    raise DataError(
        f"{option}: {where} has {shown}, not among the {len(names)} names in `labels`; correct it, or add it there"
    )


def _require_examples(where: str, present: set[int], names: Sequence[str], absent: Absent | None) -> None:
    if absent == "any":
        return
    for name in absent or ():
        if name not in names:
            raise DataError(f"absent: {name!r} is not among the names in `labels`{did_you_mean(name, names)}")
    empty = [name for place, name in enumerate(names) if place not in present and name not in (absent or ())]
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
