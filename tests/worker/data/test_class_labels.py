"""The names of classes: checked in a time that grows with their number, and not with its square."""

from __future__ import annotations

import tomllib
import unicodedata
from decimal import Decimal

import pytest

from tessera.shared.model.dataset_schema import name_digests
from tessera.shared.near_names import nearest
from tessera.worker.data.readers.class_labels import _each_once, combinations, numbered
from tessera.worker.errors import DataError


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


ACCENT = "L\u00e9sion"
DECOMPOSED = unicodedata.normalize("NFD", ACCENT)


@pytest.mark.parametrize(
    ("values", "names", "expected"),
    [
        ([1.0, 0.0], None, [1, 0]),
        (["1.0", "0.0"], None, [1, 0]),
        ([Decimal("1.00"), Decimal("0.00")], None, [1, 0]),
        ([1.0, 0.0], ("0.0", "1.0"), [1, 0]),
        ([1.0, 0], ("0", "1"), [1, 0]),
        ([1, "0"], ("0.0", "1.0"), [1, 0]),
        ([0.5, Decimal("1.50")], ("0.5", "1.50"), [0, 1]),
        ([True, False, "True", "false"], ("false", "true"), [1, 0, 1, 0]),
        ([True, False, "true"], ("False", "True"), [1, 0, 1]),
        ([DECOMPOSED, ACCENT], ("Normal", ACCENT), [1, 1]),
        ([DECOMPOSED, ACCENT], ("Normal", DECOMPOSED), [1, 1]),
    ],
)
def test_one_class_in_two_forms_has_one_number(
    values: list[object], names: tuple[str, ...] | None, expected: list[int]
) -> None:
    assert numbered("label", "the table", values, names, "any") == expected


@pytest.mark.parametrize("values", [[1.5, 0.0], [True, False], [Decimal("0.5"), 1], [-1, 1], ["yes", "L'un"]])
def test_values_in_a_message_are_accepted_as_labels(values: list[object]) -> None:
    with pytest.raises(DataError) as refused:
        numbered("label", "the table", values, None)
    shown = str(refused.value).partition(" has ")[2].partition(";")[0]
    names = tomllib.loads(f"labels = [{shown}]")["labels"]
    known = names if len(names) == len(values) else [*names, "0", "1"]
    assert min(numbered("label", "the table", values, known, "any")) >= 0


def test_missing_labels_are_counted_and_the_first_is_named() -> None:
    with pytest.raises(DataError, match=r"label: a has no value in 3 rows, first in row 1: fill it in, or remove"):
        numbered("label", "a", [1.0, None, float("nan"), ""], None)
    with pytest.raises(DataError, match=r"has 'x', not among .*'x' is first in row 2; there is no value in 1 row, "):
        numbered("label", "a", ["a", None, "x"], ["a"])


@pytest.mark.parametrize("cell", [["a", "b"], "['a', 'b']", '["a"]', "[0, 1]", ("a", "b")])
def test_several_classes_in_a_cell_are_refused(cell: object) -> None:
    with pytest.raises(
        DataError, match='give each example one class, or for several set problem_type = "multi_label"'
    ):
        numbered("label", "a", ["a", cell], None if isinstance(cell, str) else ["a", "b"])


def test_names_that_are_several_classes_are_found() -> None:
    assert combinations(["edema", "effusion", "edema|effusion"]) == ["edema|effusion"]
    assert combinations(["a", "b", "a, b", "c;d", "['a', 'b']"]) == ["['a', 'b']", "a, b", "c;d"]
    assert combinations(["pneumonia, viral", "normal", "a/c", "a"]) == []


def test_names_of_one_look_are_refused_and_have_one_digest() -> None:
    with pytest.raises(ValueError, match="named twice"):
        _each_once((ACCENT, DECOMPOSED))
    with pytest.raises(DataError, match="two classes of one name"):
        numbered("label", "the table", [ACCENT], (ACCENT, DECOMPOSED))
    assert name_digests([DECOMPOSED.upper(), "b"]) == name_digests([ACCENT, "b"])
    assert name_digests([ACCENT, DECOMPOSED]) == ()
    assert nearest(DECOMPOSED, [ACCENT, "Version"]) == ACCENT
