"""Tables in folders: saved by `datasets`, or as shards; the names of their classes, and the choice of a split."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tessera.worker.data.readers.table_files import Separator
from tessera.worker.data.readers.tables import DataTable, read_table, separator_of
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tests.support.pretrained import bert_tokenizer

CLASSES = datasets.ClassLabel(names=["benign", "malignant"])
TEXTS = ["the cat", "the dog", "a cat"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def rows(texts: list[str] = TEXTS) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": CLASSES})
    return datasets.Dataset.from_dict({"text": texts, "label": [0, 1, 0][: len(texts)]}, features=features)


def saved(folder: Path, data: datasets.Dataset | datasets.DatasetDict) -> Path:
    data.save_to_disk(str(folder))
    return folder


def texts(table: DataTable) -> list[Any]:
    return table.column("text", "text")


def refusal(*named: Path, split: str | None = None) -> str:
    with pytest.raises(DataError) as refused:
        read_table("file", named, split)
    return str(refused.value)


def test_saved_folder_is_read_with_the_names_of_its_classes(tmp_path: Path) -> None:
    # Of a selection only the selected rows are saved, in their order.
    table = read_table("file", (saved(tmp_path / "notes", rows().select([2, 1])),))
    assert texts(table) == ["a cat", "the dog"]
    assert table.column("label", "label") == ["benign", "malignant"]
    assert table.classes == {"label": ("benign", "malignant")}


def test_number_of_a_class_in_a_table_means_its_name_there(tmp_path: Path) -> None:
    folder = saved(tmp_path / "notes", rows())
    rows().to_parquet(str(tmp_path / "notes.parquet"))
    bert = str(bert_tokenizer(tmp_path / "bert", ("the", "a", "cat", "dog")))
    for file in (folder, tmp_path / "notes.parquet"):
        options = {"file": str(file), "tokenizer": bert}
        assert load("text", options).tensors["labels"].tolist() == [0, 1, 0]
        turned = load("text", {**options, "labels": ["malignant", "benign"]})
        assert turned.tensors["labels"].tolist() == [1, 0, 1]
        with pytest.raises(DataError, match="has 'benign', 'malignant', not among the 2 names"):
            load("text", {**options, "labels": ["no", "yes"]})


def test_tags_of_words_and_missing_labels_have_names_too(tmp_path: Path) -> None:
    tags = datasets.Features({"tags": datasets.Sequence(CLASSES), "label": CLASSES})
    data = datasets.Dataset.from_dict({"tags": [[0, 1], []], "label": [-1, None]}, features=tags)
    table = read_table("file", (saved(tmp_path / "tagged", data),))
    assert table.column("label", "tags") == [["benign", "malignant"], []]
    assert table.column("label", "label") == [None, None]


def test_images_in_a_saved_folder_are_read_as_bytes(tmp_path: Path) -> None:
    pictures = [BytesIO(), BytesIO()]
    for picture, colour in zip(pictures, ("black", "white"), strict=True):
        Image.new("RGB", (4, 4), colour).save(picture, "PNG")
    features = datasets.Features({"image": datasets.Image(), "label": CLASSES})
    cells = [{"bytes": picture.getvalue(), "path": None} for picture in pictures]
    data = datasets.Dataset.from_dict({"image": cells, "label": [0, 1]}, features=features)
    folder = saved(tmp_path / "scans", datasets.DatasetDict(train=data))
    dataset = load("images", {"file": str(folder), "size": 2, "channels": 1})
    assert dataset.tensors["pixel_values"].flatten(1).tolist() == [[-1] * 4, [1] * 4]
    with pytest.raises(DataError, match="was saved by `datasets`, as a table: name it in `file`"):
        load("images", {"folder": str(folder), "size": 2})


def test_split_of_a_saved_folder_is_chosen_by_name(tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=rows(), test=rows(["the end"]))
    folder = saved(tmp_path / "both", both)
    assert texts(read_table("file", (folder,), "test")) == ["the end"]
    assert refusal(folder) == f"split: {folder} has several splits: set split (--split) to one of test, train"
    assert refusal(folder, split="tset") == f"split: {folder} has no split 'tset'; it has test, train"
    assert "is a single split: leave split out" in refusal(folder / "train", split="train")
    assert "must be the only one" in refusal(folder / "train", folder / "test")
    arrow = folder / "train" / "data-00000-of-00001.arrow"
    assert f"belongs to a folder saved by `datasets`: name {folder / 'train'} instead" in refusal(arrow)
    (folder / "train" / "dataset_info.json").write_text("{")
    assert "cannot be read" in refusal(folder, split="train")
    (folder / "dataset_dict.json").write_text(json.dumps(["train"]))
    assert "dataset_dict.json cannot be read: save the folder again" in refusal(folder)
    assert "it has no rows" in refusal(saved(tmp_path / "none", rows().select([])))


def test_shards_in_a_folder_or_of_a_pattern_are_one_table_in_order(tmp_path: Path) -> None:
    for place in (1, 0):
        rows([TEXTS[place]]).to_parquet(str(tmp_path / f"train-0000{place}-of-00002.parquet"))
    (tmp_path / "README.md").write_text("notes")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "~$notes.csv").write_text("locked by a program that shows tables")
    (tmp_path / "@eaDir").mkdir()
    (tmp_path / "@eaDir" / "train-00000-of-00002.parquet").write_bytes(b"its copy on a file server")
    table = read_table("file", (tmp_path,))
    assert texts(table) == ["the cat", "the dog"]
    assert table.other_files == (tmp_path / "README.md",)
    assert table.passed_over == {"@eaDir": 1, "_SUCCESS": 1, "~$notes.csv": 1}
    assert texts(read_table("file", (tmp_path / "train-*.parquet",))) == ["the cat", "the dog"]
    assert texts(read_table("file", (tmp_path / "**" / "train-*.parquet",))) == ["the cat", "the dog"]
    rows(["the end"]).to_parquet(str(tmp_path / "test-00000-of-00001.parquet"))
    assert texts(read_table("file", (tmp_path,), "test")) == ["the end"]
    assert "has several splits: set split (--split) to one of test, train" in refusal(tmp_path)


def test_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f"text\n{name}\n")
    first = tmp_path / "a.csv"
    expected = f"file: {first} is named twice: each of its rows would be two examples; name it once"
    for named in ((first, tmp_path / "*.csv"), (tmp_path, first), (first, first)):
        assert refusal(*named) == expected
    assert texts(read_table("file", (first, tmp_path / "b.csv"))) == ["a", "b"]
    (tmp_path / "c.csv").symlink_to(first)
    assert f"{tmp_path / 'c.csv'} is named twice, also as {first}: " in refusal(tmp_path)


def test_files_named_for_splits_are_not_mixed(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(f"text\n{name}\n")
    assert "has several splits" in refusal(tmp_path)
    assert texts(read_table("file", (tmp_path,), "train")) == ["train"]
    (tmp_path / "test.csv").rename(tmp_path / "more.csv")
    assert texts(read_table("file", (tmp_path,))) == ["test", "train"]


def test_wrong_path_is_answered_with_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text\nthe cat\n")
    (tmp_path / "scans").mkdir()
    assert refusal(tmp_path / "note.csv").endswith("note.csv; did you mean `notes.csv`?")
    assert refusal(tmp_path / "*.tsv").endswith("*.tsv; check the path")
    assert "split: needs a folder" in refusal(tmp_path / "notes.csv", split="train")
    assert "contains no table (.csv, .tsv, .parquet, .jsonl, .ndjson); it contains nothing" in refusal(
        tmp_path / "scans"
    )
    (tmp_path / "scans" / "a.png").touch()
    assert "it contains a.png" in refusal(tmp_path / "scans")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_columns_are_divided_by_the_separator_that_is_named(tmp_path: Path, separator: Separator) -> None:
    file = tmp_path / "notes.csv"
    rows = [["text", "label"], ['"the, cat; sat|\there\n"', "no"], ["a dog", "yes"]]
    file.write_text("".join(separator.join(row) + "\n" for row in rows))
    table = read_table("file", (file,), separator=separator)
    assert texts(table) == ["the, cat; sat|\there\n", "a dog"]
    assert table.column("label", "label") == ["no", "yes"]
    assert separator_of(file, 64) == separator


def test_separator_is_found_only_if_one_fits_all_rows(tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    for content, found in (
        ("a;b\n1,5;2\n", ";"),
        ('a\tb\n"the ""cat"", here"\tyes\n\n', "\t"),
        ("a;b,c\n1;2,3\n", None),
        ("text\nthe cat, here\n", None),
        ("a;b\n1;2;3\n", None),
        ("", None),
    ):
        file.write_text(content)
        assert separator_of(file, 64) == found
    file.write_bytes("a;b\nfür;2\n".encode("latin-1"))
    assert separator_of(file, 64) is None


@pytest.mark.parametrize(("other", "named"), [(";", None), (",", ";"), ("\t", "|")])
def test_other_separator_is_refused_rather_than_read_as_one_column(
    tmp_path: Path, other: str, named: Separator | None
) -> None:
    file = tmp_path / "notes.csv"
    file.write_text("text;label\nthe cat;no\n".replace(";", other))
    with pytest.raises(DataError) as refused:
        read_table("file", (file,), separator=named)
    wrong = f"separator: the columns of {file} are separated by {other!r}, not {named or ','!r}"
    assert str(refused.value) == f"{wrong}: set separator = {json.dumps(other)}"


def test_separator_in_a_quoted_name_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text('"text, in short"\nthe cat\n')
    assert read_table("file", (tmp_path / "notes.csv",)).names == ["text, in short"]


def test_separator_of_another_table_than_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"text": "the cat"}\n')
    for file in (tmp_path / "notes.jsonl", saved(tmp_path / "saved", rows())):
        with pytest.raises(DataError, match="is not a CSV file: leave separator out"):
            read_table("file", (file,), separator=";")


def test_table_in_another_encoding_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_bytes("text,label\nfür,no\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"its texts are not UTF-8; save it as UTF-8"):
        read_table("file", (tmp_path / "notes.csv",))


@pytest.mark.parametrize("lacking", [0, 1])
def test_parquet_shard_without_a_column_is_named(tmp_path: Path, lacking: int) -> None:
    for shard in range(2):
        columns = {"text": ["the cat"]} if shard == lacking else {"text": ["a dog"], "label": ["yes"]}
        parquet.write_table(pa.table(columns), tmp_path / f"{shard}.parquet")
    with pytest.raises(DataError, match=r"0.parquet .* it and 1.parquet differ in columns: .* has label"):
        read_table("file", (tmp_path,))


NAMED, TURNED = (
    datasets.Features({"label": datasets.ClassLabel(names=names)})
    for names in (["benign", "malignant"], ["malignant", "benign"])
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (NAMED, TURNED),
        (NAMED, datasets.Features({"label": datasets.Value("int64")})),
        (datasets.Features({"label": datasets.Value("int64")}), NAMED),
        (datasets.Features({"label": datasets.Value("string")}), NAMED),
        (
            datasets.Features({"label": datasets.Sequence(NAMED["label"])}),
            datasets.Features({"label": datasets.Sequence(TURNED["label"])}),
        ),
        (
            datasets.Features({"label": datasets.Sequence(NAMED["label"])}),
            datasets.Features({"label": datasets.Sequence(datasets.Value("int64"))}),
        ),
    ],
)
def test_parquet_files_with_different_names_for_the_numbers_of_classes_are_refused(
    tmp_path: Path, first: datasets.Features, second: datasets.Features
) -> None:
    for name, features in (("0", first), ("1", second)):
        cells: list[Any] = [0, 1] if isinstance(features["label"], datasets.ClassLabel | datasets.Value) else [[0]]
        data = datasets.Dataset.from_dict({"label": cells}, features=features)
        data.to_parquet(str(tmp_path / f"{name}.parquet"))
    assert refusal(tmp_path) == (
        f"file: {tmp_path / '0.parquet'} cannot be read: it and 1.parquet have different class names for the numbers "
        "in column 'label': write both with one ClassLabel; correct it, or name another"
    )


def test_parquet_file_with_classes_as_text_fits_one_with_their_numbers(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"label": [0, 1]}, features=NAMED).to_parquet(str(tmp_path / "0.parquet"))
    parquet.write_table(pa.table({"label": ["malignant", "benign"]}), tmp_path / "1.parquet")
    table = read_table("file", (tmp_path,))
    assert table.column("label", "label") == ["benign", "malignant", "malignant", "benign"]


def test_csv_file_whose_quotation_marks_join_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text('text,label\nfine,no\n"the cat sat,no\n"a dog ran,yes\nit ended,no\n')
    assert "line 3 of notes.csv has a quotation mark that is not closed" in refusal(tmp_path / "notes.csv")


def test_csv_file_keeps_doubled_quotation_marks_and_quoted_line_breaks_and_long_texts(tmp_path: Path) -> None:
    long = "word " * 40_000  # 200,000 characters, more than Python's own limit
    (tmp_path / "notes.csv").write_text(f'text,label\n"the ""cat""\nsat",no\n5" long,no\n"{long}",yes\n')
    assert texts(read_table("file", (tmp_path / "notes.csv",))) == ['the "cat"\nsat', '5" long', long]


def test_quotation_mark_without_an_end_is_not_followed_through_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text('text,label\n"the cat,no\n' + "a dog,yes\n" * (2 << 20))
    expected = "the row that begins in line 2 of notes.csv has a cell of more than 16,777,216 characters: close its"
    assert expected in refusal(tmp_path / "notes.csv")


def test_types_that_arrow_cannot_take_rows_of_are_read(tmp_path: Path) -> None:
    words = pa.array([["a", "b"], ["c"]], pa.list_(pa.string_view()))
    record = pa.array([{"x": "a"}, {"x": None}], pa.struct([("x", pa.string_view())]))
    of_text = pa.array(["a", "b"], pa.string_view())
    columns = {"text": of_text, "words": words, "record": record, "bytes": pa.array([b"1", b"2"], pa.binary_view())}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    columns |= {
        "list_view": pa.array([["a"], []], pa.list_view(pa.string())),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), of_text),
    }
    saved = datasets.Dataset.from_dict({"text": ["a", "b"]})
    saved.save_to_disk(str(tmp_path / "saved"))
    rows = pa.table(columns)
    (stream,) = (tmp_path / "saved").glob("*.arrow")
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows)
    for table in (read_table("file", (tmp_path / "a.parquet",)), read_table("file", (tmp_path / "saved",))):
        for name in table.names:
            assert table.column("text", name) == rows.column(name).to_pylist()


def test_rows_that_were_filtered_out_are_not_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": list("abcdef")})
    rows.save_to_disk(str(tmp_path / "old"))
    with pa.ipc.new_stream(tmp_path / "old" / "indices.arrow", pa.schema([("indices", pa.uint64())])) as writer:
        writer.write_table(pa.table({"indices": pa.array([0, 3], pa.uint64())}))
    state = json.loads((tmp_path / "old" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "old" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError) as refused:
        read_table("file", (tmp_path / "old",))
    remedy = re.search(r"load_from_disk.*save_to_disk\(", str(refused.value))
    assert remedy is not None
    code = f"{remedy[0]}{str(tmp_path / 'new')!r})"
    eval(code, {"pyarrow": pa, "load_from_disk": datasets.load_from_disk})  # noqa: S307  (the remedy works)
    assert read_table("file", (tmp_path / "new",)).column("text", "text") == ["a", "d"]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("text,label\nthe left lung\nis clear,a\n", "line 2 of a.csv has 1 cells for 2 columns"),
        ("text,label\na,b\nc\n", "line 3 of a.csv has 1 cells for 2 columns"),
        ("sep=;\ntext;label\na;b\n", "line 1 of .* is Excel's 'sep=;', not the columns' names: remove the line"),
        ("text,label,label\na,b,c\n", "several columns are called 'label'"),
    ],
)
def test_rows_and_headers_that_do_not_fit_are_named(tmp_path: Path, lines: str, reason: str) -> None:
    (tmp_path / "a.csv").write_text(lines)
    with pytest.raises(DataError, match=reason):
        read_table("file", (tmp_path / "a.csv",))


def test_a_name_that_is_twice_in_a_row_of_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "a", "label": 0, "label": 1}\n')
    with pytest.raises(DataError, match="line 2: several columns are called 'label'"):
        read_table("file", (tmp_path / "a.jsonl",))


def test_a_blank_line_is_no_row_and_spaces_around_a_name_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text, label \na,1\n\nb,0\n")
    table = read_table("file", (tmp_path / "a.csv",))
    assert table.column("label", "label") == table.column("label", " label ") == ["1", "0"]
