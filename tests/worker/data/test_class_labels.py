"""The names of classes: checked in a time that grows with their number, and not with its square."""

from __future__ import annotations

import pytest

from tessera.worker.data.dataset import DataError
from tessera.worker.data.readers.class_labels import _each_once, numbered


class Name(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Name.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_each_name_is_compared_with_few_others() -> None:
    names = tuple(Name(f"class {number}") for number in range(1000))
    absent = tuple(Name(name) for name in names[1:])
    assert _each_once(names) == names
    assert numbered("label", "the table", ["class 0"], names, absent) == [0]
    # Once where a name is looked up by an equal one.
    assert Name.comparisons < 10 * len(names)


def test_names_that_stand_twice_or_are_absent_without_being_a_class_are_named() -> None:
    with pytest.raises(ValueError, match=r"named twice: a, b$"):
        _each_once(("b", "a", "b", "c", "a"))
    with pytest.raises(DataError, match="absent: 'd' is not among the names in `labels`"):
        numbered("label", "the table", ["a"], ("a", "b"), ("d",))
