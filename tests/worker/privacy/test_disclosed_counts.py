"""What the counts of a data set reveal of subjects that are fewer than the minimum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.tensors.lazy import Array
from tessera.worker.governance.described_data import changed_subjects
from tessera.worker.governance.disclosure import DisclosureRule
from tessera.worker.privacy.disclosed_counts import CellTable, disclosed_counts, noisy_counts

CELLS = 4


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[Array, dict[str, Array]]:
    """Subjects with a few examples each, and two tables. Some cells are rare."""
    subjects = np.array(draw(st.lists(st.integers(0, 30), max_size=80)), np.int64)
    skewed = st.sampled_from([0] * 12 + [1] * 6 + [2, 3, -1])
    columns = [draw(st.lists(skewed, min_size=len(subjects), max_size=len(subjects))) for _ in range(2)]
    return subjects, {name: np.array(cells, np.int64) for name, cells in zip(("class", "size"), columns, strict=True)}


rules = st.builds(DisclosureRule, st.integers(10, 17), st.integers(5, 8))


def counted(subjects: Array, columns: Mapping[str, Array], rule: DisclosureRule) -> dict[str, list[int]]:
    tables = {name: CellTable.of(cells, CELLS) for name, cells in columns.items()}
    return {name: counts.tolist() for name, counts in disclosed_counts(subjects, tables, rule).items()}


def distinct(subjects: Array, cells: Array, cell: int) -> int:
    return len(set(subjects[cells == cell].tolist()))


@given(data_sets(), rules)
def test_a_suppressed_cell_is_as_if_its_examples_were_not_there(
    data: tuple[Array, dict[str, Array]], rule: DisclosureRule
) -> None:
    subjects, columns = data
    found = counted(subjects, columns, rule)
    for name, cells in columns.items():
        for cell in range(CELLS):
            if distinct(subjects, cells, cell) < rule.least:
                rest = cells != cell
                without = {other: column[rest] for other, column in columns.items()}
                assert found[name][cell] == 0
                assert counted(subjects[rest], without, rule) == found


@given(data_sets(), rules)
def test_counts_are_multiples_of_the_step_that_no_single_number_gives(
    data: tuple[Array, dict[str, Array]], rule: DisclosureRule
) -> None:
    for counts in counted(*data, rule).values():
        assert all(count % rule.step == 0 and (count == 0 or count >= rule.least) for count in counts)
    numbers = np.arange(200)
    shown = rule.shown(numbers)
    alike = np.unique(shown[: 200 // rule.step * rule.step - rule.step], return_counts=True)[1]
    assert min(alike) > 1


def test_a_patient_with_many_examples_counts_once() -> None:
    subjects = np.repeat(np.arange(12), 50)
    columns = {"class": np.where(subjects == 0, 1, 0)}
    assert counted(subjects, columns, DisclosureRule()) == {"class": [10, 0, 0, 0]}


def test_two_tables_do_not_show_a_suppressed_cell_by_their_difference() -> None:
    # 9 subjects of class 1 have an ordinary size: the sizes alone would say 109, and the classes 100.
    columns = {"class": np.repeat([0, 1], [100, 9]), "size": np.zeros(109, np.int64)}
    assert counted(np.arange(109), columns, DisclosureRule()) == {"class": [100, 0, 0, 0], "size": [100, 0, 0, 0]}


def test_leaving_out_a_cell_empties_another_that_becomes_too_small() -> None:
    # Without the 3 of the rare size, class 1 has 9.
    columns = {"class": np.repeat([0, 1], [50, 12]), "size": np.repeat([0, 1, 0], [50, 3, 9])}
    assert counted(np.arange(62), columns, DisclosureRule()) == {"class": [50, 0, 0, 0], "size": [50, 0, 0, 0]}


def test_an_example_in_several_cells_counts_in_each() -> None:
    table = CellTable(np.repeat(np.arange(20), 2), np.tile([0, 2], 20), CELLS)
    assert disclosed_counts(np.arange(20), {"tags": table}, DisclosureRule())["tags"].tolist() == [20, 0, 20, 0]


def test_no_example_gives_no_count() -> None:
    nobody = np.zeros(0, np.int64)
    assert counted(nobody, {"class": nobody}, DisclosureRule()) == {"class": [0, 0, 0, 0]}


digests = st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=30)


@given(digests, digests)
def test_added_removed_and_changed_subjects_count_once_each(earlier: dict[int, int], now: dict[int, int]) -> None:
    pairs = [np.array([*each.items()], np.uint64).reshape(-1, 2) for each in (earlier, now)]
    expected = sum(earlier.get(subject) != now.get(subject) for subject in earlier.keys() | now.keys())
    assert changed_subjects(*pairs) == expected


@pytest.mark.parametrize("step", [5, 10])
def test_noise_has_the_deviation_that_its_cost_says(step: int) -> None:
    subjects, tables = (
        np.arange(3000),
        {"a": CellTable.of(np.arange(3000) % 3, 3), "b": CellTable.of(np.arange(3000) % 3, 3)},
    )
    source, rho = NoiseSource(bytes(32)), 0.005
    found = [noisy_counts(subjects, tables, DisclosureRule(step=step), rho, source) for _ in range(300)]
    counts = np.concatenate([each[name] for each in found for name in tables])
    # sqrt(2 tables / rho) is 20. Rounding adds step^2 / 12.
    assert abs(counts.mean() - 1000) < 3
    assert abs(counts.std() - np.sqrt(400 + step**2 / 12)) < 2
    assert set(counts % step) == {0}


def test_with_noise_a_patient_counts_once_in_each_table() -> None:
    subjects = np.repeat(np.arange(100), 50)
    table = CellTable.of(np.arange(5000) % 2, 2)
    found = noisy_counts(subjects, {"a": table}, DisclosureRule(), 1e9, NoiseSource(bytes(32)))
    assert abs(int(found["a"].sum()) - 100) <= 5
