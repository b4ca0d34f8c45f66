"""Subgroups of a data set, and which examples are behind counts that leave."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tessera.shared.model.dataset_schema import DatasetSchema
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Subgroups
from tessera.worker.data.kinds.arrays import ArraysOptions, arrays
from tessera.worker.data.kinds.text import TextOptions, text
from tessera.worker.errors import DataError
from tessera.worker.executor.stages.describe import subject_tables
from tessera.worker.executor.stages.evaluate import countable

ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("fmx"), st.sampled_from("uv"), st.integers(0, 30)))


def kept(rows: list[tuple[int, str, str, int]], least: int) -> list[tuple[int, str, str, int]]:
    if not rows:
        return []
    named = {"sex": (1, ("f", "m")), "unit": (2, ("u",))}
    data = Dataset(
        {"labels": torch.tensor([row[0] for row in rows])},
        subgroups={name: Subgroups.of(values, [row[at] for row in rows]) for name, (at, values) in named.items()},
        groups=[b"" if row[3] > 25 else str(row[3]).encode() for row in rows],
    )
    return [rows[place] for place in countable(data, least).tolist()]


@given(ROWS, st.integers(1, 5))
def test_each_cell_that_is_left_has_enough_subjects_and_the_others_look_empty(
    rows: list[tuple[int, str, str, int]], least: int
) -> None:
    left = kept(rows, least)
    for column in (1, 2):
        cells: dict[tuple[int, str], Counter[str]] = {}
        for number, row in enumerate(left):
            value = row[column] if row[column] in "fmu" else "other"
            subject = f"alone {number}" if row[3] > 25 else str(row[3])
            cells.setdefault((row[0], value), Counter())[subject] += 1
        assert all(len(subjects) >= least for subjects in cells.values())
    # A site that has none of the examples left out sends the same, to the last bit.
    assert kept(left, least) == left


def test_a_label_or_its_absence_with_few_subjects_is_left_out() -> None:
    labels = torch.zeros(12, 3)
    labels[:6, 0], labels[:2, 1], labels[1:, 2] = 1, 1, 1
    data = Dataset(
        {"labels": labels},
        schema=DatasetSchema(problem="multi_label"),
        groups=[str(n // 2).encode() for n in range(12)],
    )
    # Label 1 has two examples of one patient. Of label 2 one example is without, and it has label 1 too.
    assert countable(data, 2).tolist() == list(range(2, 12))
    # Label 0 has then two patients, and is left out too.
    assert countable(data, 3).tolist() == list(range(6, 12))
    assert countable(data, 1).tolist() == list(range(12))
    tables = subject_tables(data).tables
    kept = np.ones(12, bool)
    assert tables["classes"].counts(np.arange(12), kept).tolist() == [6, 2, 11]
    numbers = Dataset({"labels": labels[:, 0] / 3}, schema=DatasetSchema(problem="regression"))
    assert countable(numbers, 10).tolist() == list(range(12))


def test_a_text_with_a_class_of_words_that_few_have_is_left_out() -> None:
    words = torch.tensor([[0, 0, -100], [0, 1, 2], [0, 1, -100], [0, 1, 1], [0, 0, 0]])
    data = Dataset({"labels": words})
    assert countable(data, 2, by_word=True).tolist() == [0, 2, 3, 4]
    # Class 1 has then two texts, and class 0 the two that are left.
    assert countable(data, 3, by_word=True).tolist() == []
    # Tokens of a vocabulary are no classes.
    assert countable(data, 2).tolist() == [0, 1, 2, 3, 4]


def test_columns_of_tables_and_arrays_are_read_and_unknown_values_are_other(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("text,label,sex\n" + "".join(f"a {n},{n % 2},{'FM?'[n % 3]}\n" for n in range(6)))
    options = TextOptions.model_validate(
        {"file": table, "tokenizer": "run", "subgroups": {"sex": ["F", "M"]}, "labels": ["0", "1"]}
    )
    found = text(options)
    assert found.subgroups["sex"].names == ("F", "M", "other")
    assert found.subgroups["sex"].places.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.rows(torch.tensor([5, 0])).subgroups["sex"].places.tolist() == [2, 0]
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(3, 2), "labels": torch.tensor([0, 1, 0]), "sex": torch.tensor([1, 7, 2])}, file)
    read = arrays(ArraysOptions.model_validate({"file": file, "subgroups": {"sex": ["1", "2"]}}))
    assert read.subgroups["sex"].places.tolist() == [0, 2, 1]
    assert "sex" not in read.inputs
    with pytest.raises(DataError, match="there is no tensor 'age'"):
        arrays(ArraysOptions.model_validate({"file": file, "subgroups": {"age": ["1"]}}))


@pytest.mark.parametrize("values", [["other"], ["all"], ["F", "F"], [], [str(n) for n in range(17)]])
def test_names_of_subgroups_that_would_be_ambiguous_are_refused(values: list[str]) -> None:
    with pytest.raises(ValueError, match="subgroups"):
        ArraysOptions.model_validate({"file": "a", "subgroups": {"sex": values}})
