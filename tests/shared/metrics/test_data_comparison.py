"""What several sites' descriptions say of training on their data."""

from __future__ import annotations

from typing import Any

from tessera.shared.api.descriptions import Description
from tessera.shared.metrics.data_comparison import CountTable, DataAnswers

NAMES = ("benign", "malignant", "unclear")


def site(*counts: int, **more: Any) -> Description:
    given = {"unit": "group", "minimum": 10, "step": 5, "counts": {"classes": counts}, "class_names": NAMES}
    return Description.model_validate({**given, **more})


def faults(found: dict[str, Description], silent: dict[str, str]) -> list[str]:
    return DataAnswers(found, silent).faults


def count_tables(found: dict[str, Description]) -> list[CountTable]:
    return DataAnswers(found, {}).tables


def test_a_class_without_examples_and_one_with_few_are_reported_alike() -> None:
    found = faults({"north": site(100, 50, 20), "east": site(100, 50), "west": site(80, 0, 15)}, {})
    assert [text.partition(".")[0] for text in found] == [
        "class 'malignant': fewer than 10 subjects at west",
        "class 'unclear': fewer than 10 subjects at east",
    ]


def test_classes_in_another_order_are_counted_by_name_and_reported_with_the_right_order() -> None:
    found = {"north": site(100, 50, 20), "south": site(60, 30, 10, class_names=("malignant", "benign", "unclear"))}
    (table,) = count_tables(found)
    assert table.rows["benign"] == {"north": 100, "south": 30}
    assert table.total("malignant") == 110
    (said,) = faults(found, {})
    assert said.startswith("south has the classes in another order: 'malignant' is class 0 there, and class 1 at")
    assert str(list(NAMES)) in said


def test_a_class_at_one_site_alone_is_reported() -> None:
    assert "; only north has it." in faults({"north": site(20, 20, 20), "east": site(20, 20)}, {})[0]


def test_other_names_units_tokenizers_and_silent_sites_are_reported() -> None:
    found = {
        "north": site(20, 20, 20, unknown_tokens=0.2),
        "east": site(20, 20, 20, class_names=("benign", "malign", "unclear"), unit="example"),
    }
    said = " ".join(faults(found, {"west": "it has no data set 'wards'"}))
    for part in (
        "west gave no description: it has no data set 'wards'",
        "east: counts examples",
        "east names 'malign' and does not name 'malignant'",
        "north: the tokenizer does not know more than 20% of the tokens",
    ):
        assert part in said


def test_sites_alike_have_no_faults() -> None:
    assert faults({"north": site(20, 20, 20), "east": site(30, 25, 10)}, {}) == []


def test_bins_begin_with_the_first_that_counts() -> None:
    counts = {"words": (0, 0, 0, 40, 10)}
    (table,) = count_tables({"north": site(counts=counts, class_names=())})
    assert table.rows == {"8 to 15": {"north": 40}, "16 to 31": {"north": 10}}
