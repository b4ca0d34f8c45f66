"""Labels that are not one class for each example: several of them, numbers, and entities as spans of characters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.data.targets.spans import WORD
from tessera.worker.errors import DataError
from tests.support.pretrained import bert_tokenizer

NAMES = ["edema", "effusion", "mass"]
SEVERAL: dict[str, Any] = {"problem_type": "multi_label", "labels": NAMES, "absent": "any"}
TAGS = ["O", "B-drug", "I-drug", "B-dose", "I-dose"]


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return str(bert_tokenizer(tmp_path / "bert", ("the", "cat", "sat", ".", "10", "mg", "of", "aspirin")))


def lines(file: Path, rows: list[Mapping[str, object]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def csv(file: Path, *rows: str) -> str:
    file.write_text("\n".join(rows) + "\n")
    return str(file)


def texts(tokenizer: str, file: str, **options: Any) -> Dataset:
    return load("text", {"file": file, "tokenizer": tokenizer, **options})


def refusal(tokenizer: str, file: str, **options: Any) -> str:
    with pytest.raises(DataError) as refused:
        texts(tokenizer, file, **options)
    return str(refused.value)


def test_several_labels_are_read_from_lists_and_columns_alike(tmp_path: Path, bert: str) -> None:
    listed = [["edema", "mass"], [], ["effusion"], ["mass", "mass"]]
    rows = [{"text": "the cat", "label": each} for each in listed]
    of_lines = lines(tmp_path / "a.jsonl", rows)
    of_marks = csv(
        tmp_path / "b.csv", "text,label", "the cat,edema|mass", "the cat,", "the cat,effusion", "the cat,mass; "
    )
    quoted = ('"[""edema"", ""mass""]"', "[]", "effusion", '"[""mass""]"')
    of_json = csv(tmp_path / "c.csv", "text,label", *(f"the cat,{cell}" for cell in quoted))
    columns = csv(
        tmp_path / "d.csv",
        "text,mass,edema,effusion",
        *("the cat," + row for row in ("1,true,0.0", "0,0,false", "0,0,1", "1.0,0,0")),
    )
    wanted = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
    for file in (of_lines, of_marks, of_json, columns):
        found = texts(bert, file, **SEVERAL, label_columns=file == columns)
        assert torch.equal(found.tensors["labels"], wanted), file
        assert found.report.unlabelled == 1
        assert "1 example has no label" in found.report.sentences()[0]
        assert (found.schema.problem, found.schema.classes) == ("multi_label", 3)
        assert found.schema.inputs["labels"].shape == (3,)


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        (["edema", "oedema"], "has 'oedema', not among the 3 names in `labels`"),
        ([1, 0, 0], "row 1 .* may be numbers of labels, or a 1 or 0 for each label"),
        ("[0.0, 1.0, 1.0]", "row 1 .* may be numbers of labels, or a 1 or 0 for each label"),
        ("['edema', 'mass']", "row 1 .* has a list that is no JSON"),
        ([["edema"]], r"'edema'\] is first in row 1"),
        ([float("nan")], "no value in 1 row, first in row 1"),
    ],
)
def test_labels_that_are_not_listed_are_refused_by_their_row(
    tmp_path: Path, bert: str, cell: object, told: str
) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": "the cat", "label": each} for each in (["mass"], cell)])
    with pytest.raises(DataError, match=told):
        texts(bert, file, **SEVERAL)


def test_a_label_without_an_example_is_refused_and_so_is_a_column_with_other_values(
    tmp_path: Path, bert: str
) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": "the cat", "label": ["edema", "mass"]}])
    assert "has no example of 'effusion'" in refusal(bert, file, **{**SEVERAL, "absent": None})
    file = csv(tmp_path / "d.csv", "text,mass,edema,effusion", "the cat,1,1,1", "the cat,1,-1,1")
    said = refusal(bert, file, **SEVERAL, label_columns=True)
    assert "row 1 of" in said
    assert "'-1' in column 'edema'" in said
    assert "problem_type" in refusal(bert, file, label_columns=True)
    assert "two labels or more" in refusal(bert, file, problem_type="multi_label")


def test_targets_are_numbers_and_others_are_refused_by_their_row(tmp_path: Path, bert: str) -> None:
    file = csv(tmp_path / "a.csv", "text,label", "the cat,3.5", "the cat, -1e3", "the cat,0")
    found = texts(bert, file, problem_type="regression")
    assert torch.equal(found.tensors["labels"], torch.tensor([3.5, -1000.0, 0.0]))
    assert (found.schema.problem, found.schema.classes) == ("regression", None)
    assert found.schema.inputs["labels"].shape == ()
    for cell in ("nan", "inf", "-Infinity", "1e31", "", "high", "1;2"):
        file = csv(tmp_path / "a.csv", "text,label", "the cat,1.0", f"the cat,{cell}")
        assert "label: row 1 of" in refusal(bert, file, problem_type="regression"), cell
    for value in (None, True, [1.0], {"x": 1}):
        file = lines(tmp_path / "a.jsonl", [{"text": "the cat", "label": each} for each in (1.0, value)])
        assert "label: row 1 of" in refusal(bert, file, problem_type="regression"), value
    assert "leave them out" in refusal(bert, file, problem_type="regression", labels=["a", "b"])
    assert "needs head text-classification" in refusal(bert, file, problem_type="regression", head="causal-lm")


def test_targets_are_standardised_by_the_numbers_given_in_training_and_held_out_alike(
    tmp_path: Path, bert: str
) -> None:
    rows = [{"text": f"the cat {number}", "label": 50.0 + number} for number in range(40)]
    whole = load(
        "text",
        {"file": lines(tmp_path / "a.jsonl", rows), "tokenizer": bert, "problem_type": "regression"},
        held_out=0.3,
        key=b"key",
    )
    scaled = whole.standardised(50.0, 4.0)
    for before, after in ((whole, scaled), (whole.held_out, scaled.held_out)):
        assert before is not None
        assert after is not None
        assert torch.equal(after.tensors["labels"], (before.tensors["labels"] - 50) / 4)


def test_images_of_a_table_have_several_labels_or_a_number(tmp_path: Path) -> None:
    for number in range(3):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    table = csv(tmp_path / "t.csv", "image,label,age", "0.png,edema|mass,60", "1.png,,62.5", "2.png,effusion,58")
    options: dict[str, Any] = {"file": table, "size": 8, "channels": 1}
    several = load("images", {**options, **SEVERAL})
    assert torch.equal(several.tensors["labels"], torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0]]))
    assert several.report.unlabelled == 1
    ages = load("images", {**options, "label": "age", "problem_type": "regression"})
    assert torch.equal(ages.tensors["labels"], torch.tensor([60.0, 62.5, 58.0]))
    # One that cannot be read is left out with its label.
    (tmp_path / "1.png").write_bytes(b"no image")
    ages = load("images", {**options, "label": "age", "problem_type": "regression", "max_unreadable": 0.5})
    assert torch.equal(ages.tensors["labels"], torch.tensor([60.0, 58.0]))
    with pytest.raises(DataError, match="are about a file"):
        load("images", {"folder": str(tmp_path), "size": 8, "channels": 1, "problem_type": "regression"})


TEXT = "the cat sat. 10mg of aspirin"


def test_spans_are_the_tags_of_the_words_that_they_cover(tmp_path: Path, bert: str) -> None:
    text = "10 mg of aspirin."
    spans = [{"start": 9, "end": 16, "label": "drug"}, {"start": 0, "end": 5, "label": "dose"}]
    options: dict[str, Any] = {"head": "token-classification", "labels": TAGS, "absent": "any"}
    by_spans = texts(bert, lines(tmp_path / "a.jsonl", [{"text": text, "label": spans}]), **options, spans=True)
    quoted = json.dumps(spans).replace('"', '""')
    in_csv = csv(tmp_path / "b.csv", "text,label", f'{text},"{quoted}"')
    tagged = {"text": ["10", "mg", "of", "aspirin", "."], "label": ["B-dose", "I-dose", "O", "B-drug", "O"]}
    by_tags = texts(bert, lines(tmp_path / "c.jsonl", [tagged]), **options)
    for found in (by_spans, texts(bert, in_csv, **options, spans=True)):
        for name, tensor in by_tags.tensors.items():
            assert torch.equal(found.tensors[name], tensor)
        assert found.schema == by_tags.schema
    # [CLS], the words, [SEP]
    assert by_spans.tensors["labels"][0, :7].tolist() == [-100, 3, 4, 0, 1, 0, -100]


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([(0, 3), (2, 7)], "from 2 to 7, which overlaps another"),
        ([(13, 15)], "begins or ends within a word"),
        ([(5, 11)], "begins or ends within a word"),
        ([(20, 99)], "is empty or outside of its 28 characters"),
        ([(-1, 3)], "is empty or outside"),
        ([(3, 3)], "is empty or outside"),
        ([(3, 4)], "has no word"),
        ([(0, "3")], "has a span"),
        ([(False, True)], "has a span"),
        (None, "has no list of spans"),
        ("[{", "has spans that are no JSON"),
        ("[" * 100_000, "has spans that are no JSON"),
    ],
)
def test_spans_that_do_not_fit_their_text_are_refused_by_the_row(
    tmp_path: Path, bert: str, spans: Any, told: str
) -> None:
    listed = isinstance(spans, list)
    cell = [{"start": first, "end": end, "label": "drug"} for first, end in spans] if listed else spans
    good = {"text": TEXT, "label": [{"start": 21, "end": 28, "label": "drug"}]}
    file = lines(tmp_path / "a.jsonl", [good, {"text": TEXT, "label": cell}])
    options = {"head": "token-classification", "labels": TAGS, "absent": "any", "spans": True}
    said = refusal(bert, file, **options)
    assert "label: row 1 of" in said
    assert told in said


def test_a_span_of_an_unknown_type_is_refused_and_spans_need_tags(tmp_path: Path, bert: str) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": TEXT, "label": [{"start": 0, "end": 3, "label": "gene"}]}])
    options = {"head": "token-classification", "absent": "any", "spans": True}
    assert "has 'B-gene', not among the 5 names" in refusal(bert, file, labels=TAGS, **options)
    assert "spans: needs head token-classification, and `labels`" in refusal(bert, file, **options)


def test_words_of_a_text_are_its_letters_digits_and_single_signs() -> None:
    assert WORD.findall("Übelkeit (10,5 mg/d)?\n") == ["Übelkeit", "(", "10", ",", "5", "mg", "/", "d", ")", "?"]


def test_a_number_that_is_no_float_is_refused_by_its_row(tmp_path: Path, bert: str) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": "the cat", "label": each} for each in (1, 10**400)])
    with pytest.raises(DataError, match=r"row 1 .* which is no number up to"):
        texts(bert, file, problem_type="regression")
