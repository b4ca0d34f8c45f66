"""Conversion of labels to a model's class numbers, which are the same at every site."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

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


def numbered(option: str, where: str, values: Sequence[object], names: Sequence[str] | None) -> list[int]:
    """Return the class number of each value.

    A value among the names is that class; another integer is a class number, unless a name is an integer too. Raises
    DataError, naming the values, if some are neither, so that no site numbers classes in an order of its own.
    """
    place = {name: number for number, name in enumerate(names or ())}
    by_number = not any(name.isdecimal() for name in place)
    numbers = [_number(value, place, by_number=by_number) for value in values]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        return known
    unknown = sorted({_shown(value) for value, number in zip(values, numbers, strict=True) if number is None})
    shown = ", ".join(unknown[:MAX_SHOWN]) + (f" and {len(unknown) - MAX_SHOWN} more" if unknown[MAX_SHOWN:] else "")
    if names is None:
        raise DataError(f"{option}: {where} has {shown}; list the classes' names in `labels`, the same at every site")
    raise DataError(f"{option}: {where} has {shown}, not among the {len(names)} names in `labels`")


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
