"""Proposed tables for the data that people have: a worker can load each, and open choices are refused."""

from __future__ import annotations

import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from tessera.worker.data.proposal import propose
from tessera.worker.data.proposal.options import SAMPLE
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tests.support.dicom_files import written
from tests.support.pretrained import bert_tokenizer


def pictures(folder: Path, *names: str, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size).save(folder / name)
    return folder


def table(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    return file


def proposed(path: Path, **given: str) -> dict[str, Any]:
    """The options, as read from the written table, without the share to hold out, which may take all of two rows."""
    options: dict[str, Any] = tomllib.loads(propose(path, **given).toml("some"))["datasets"]["some"]
    assert options.pop("held_out") == 0.2
    return options


def loaded(options: dict[str, Any]) -> list[int]:
    labels: list[int] = (
        load(options["kind"], {k: v for k, v in options.items() if k != "kind"}).tensors["labels"].tolist()
    )
    return labels


def test_folders_of_images_are_classes(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pets", "dog/a.png", "cat/deeper/b.png")
    (folder / "cat" / "c.dcm").touch()
    options = proposed(folder)
    assert options == {
        "kind": "images", "folder": str(folder), "labels": ["cat", "dog"], "size": [4, 6], "channels": 3,
    }  # fmt: skip
    assert loaded(options) == [0, 1]
    assert proposed(folder, processor="/models/vit")["processor"] == "/models/vit"
    pairs = proposed(folder, tokenizer=str(bert_tokenizer(tmp_path / "clip", ("cat", "dog", "a", "photo", "of"))))
    assert (pairs["kind"], pairs["template"], loaded(pairs)) == ("imagetext", "a photo of a {}.", [0, 1])


def test_a_folder_that_a_file_server_left_is_no_class_and_counted(tmp_path: Path) -> None:
    names = ("cat/a.png", "dog/b.png", "@eaDir/cat/a.png", "cat/#snapshot/a.png")
    folder = pictures(tmp_path / "pets", *names)
    table(folder / "._notes.csv", "what macOS keeps about a table that was here")
    proposal = propose(folder)
    assert proposal.options["labels"] == ["cat", "dog"]
    (warning,) = proposal.warnings
    assert "3 files or folders" in warning
    assert "1 #snapshot, 1 ._*, 1 @eaDir" in warning


@pytest.mark.parametrize("suffix", [".dcm", ""])
def test_a_folder_of_dicom_files_is_read_as_dicom(tmp_path: Path, suffix: str) -> None:
    for name in ("benign/a", "malignant/b"):
        (tmp_path / "scans" / name).parent.mkdir(parents=True)
        written(tmp_path / "scans" / f"{name}{suffix}", np.zeros((4, 6), np.uint16))
    (tmp_path / "scans" / "DICOMDIR").touch()
    options = proposed(tmp_path / "scans")
    assert (options["dicom"], options["size"], options["channels"]) == (True, [4, 6], 1)
    assert loaded(options) == [0, 1]


def test_damaged_dicom_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "scans" / "benign").mkdir(parents=True)
    (tmp_path / "scans" / "benign" / "a.dcm").touch()
    with pytest.raises(DataError, match=r"a\.dcm"):
        propose(tmp_path / "scans")


def test_folder_without_images_is_a_class_that_loading_asks_about(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "scans", "benign/a.png")
    (folder / "malignant").mkdir()
    (folder / "malignant" / "b.dcm").touch()
    proposal = propose(folder)
    assert proposal.options["labels"] == ["benign", "malignant"]
    assert "malignant contain no images here" in proposal.reasons["labels"]
    with pytest.raises(DataError, match=r"no example of 'malignant'; .* set absent"):
        loaded(proposed(folder))


def test_the_same_folders_in_each_folder_are_classes_in_domains(tmp_path: Path) -> None:
    names = [f"{domain}/{label}/a.png" for domain in ("photo", "sketch") for label in ("1", "10", "2")]
    options = proposed(pictures(tmp_path / "pets", *names, size=(8, 8), mode="L"))
    # Class numbers that do not begin with 0 are names, in the order of the numbers.
    assert (options["domain_folders"], options["labels"]) == (True, ["1", "2", "10"])
    assert (options["size"], options["channels"]) == (8, 1)
    assert loaded(options) == [0, 2, 1] * 2


def test_large_images_or_those_of_several_sizes_have_the_usual_size(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pets", "0/a.png")
    pictures(folder, "1/a.png", size=(9, 9))
    options = proposed(folder)
    assert options["size"] == 224
    assert "labels" not in options
    assert loaded(options) == [0, 1]


@pytest.mark.parametrize(
    ("header", "rows", "expected"),
    [
        (
            "patient_id,text,label", ["p,the cat,no", "q,a dog,yes"],
            {"head": "text-classification", "text": "text", "label": "label", "labels": ["no", "yes"],
             "group": "patient_id"},
        ),
        ("id,summary,Target", ["1,the cat sat,1", "2,a cat sat,0"], {"text": "summary", "label": "Target"}),
        ("text", ["the cat", "a dog"], {"head": "causal-lm"}),
    ],
)  # fmt: skip
def test_columns_of_texts_and_classes_are_found(
    tmp_path: Path, header: str, rows: list[str], expected: dict[str, object]
) -> None:
    file = table(tmp_path / "notes.csv", header, *rows)
    assert propose(file).options["tokenizer"] == "run"
    assert propose(file, tokenizer="run").options == propose(file).options
    options = proposed(file, tokenizer=str(bert_tokenizer(tmp_path / "bert", ("the", "a", "cat"))))
    assert options.items() >= {"kind": "text", "file": str(file), **expected}.items()
    assert len(loaded(options)) == 2


def test_table_of_images_and_saved_folder_are_read_by_their_types(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    pictures(tmp_path, "a.png", "b.png")
    options = proposed(table(tmp_path / "list.csv", "file_name,class", "a.png,ill", "b.png,well"))
    assert (options["kind"], options["image"], options["labels"]) == ("images", "file_name", ["ill", "well"])
    assert loaded(options) == [0, 1]
    classes = datasets.ClassLabel(names=["z", "a"])
    features = datasets.Features(
        {"words": datasets.Sequence(datasets.Value("string")), "ner": datasets.Sequence(classes)}
    )
    rows = datasets.Dataset.from_dict({"words": [["the", "cat"]], "ner": [[0, 1]]}, features=features)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"set split \(--split\) to one of test, train"):
        propose(tmp_path / "saved")
    options = proposed(
        tmp_path / "saved", split="train", tokenizer=str(bert_tokenizer(tmp_path / "b", ("the", "cat")))
    )
    assert (options["head"], options["text"], options["labels"]) == ("token-classification", "words", ["z", "a"])
    assert load("text", {k: v for k, v in options.items() if k != "kind"}).tensors["labels"].tolist() == [
        [-100, 0, 1, -100]
    ]


@pytest.mark.parametrize("given", [{"label": "level"}, {"label": "level", "text": "image"}])
@pytest.mark.parametrize("below", ["", "part_1/"])
def test_names_of_images_without_suffix_are_not_proposed_as_texts(
    tmp_path: Path, given: dict[str, str], below: str
) -> None:
    pictures(tmp_path, f"{below}10_left.jpeg", f"{below}10_right.jpeg")
    file = table(tmp_path / "a.csv", "image,level,localization", "10_left,0,scalp", "10_right,1,upper extremity")
    with pytest.raises(
        DataError, match=f"column 'image' has names of image files.* '{below}10_left.jpeg'"
    ) as refused:
        propose(file, **given)
    assert "lacks its suffix" in str(refused.value)
    options = proposed(table(file, "image,level", f"{below}10_left.jpeg,0", f"{below}10_right.jpeg,1"), label="level")
    assert (options["kind"], loaded(options)) == ("images", [0, 1])


def test_image_of_a_table_that_is_spelt_otherwise_is_named_with_its_path(tmp_path: Path) -> None:
    pictures(tmp_path, "cat/1.png")
    file = table(tmp_path / "a.csv", "image,label", "cat\\1.PNG,0")
    with pytest.raises(DataError, match="has the separators of Windows and differs in upper and lower case: write"):
        propose(file)


def test_one_odd_cell_does_not_make_a_column_of_images_one_of_texts(tmp_path: Path) -> None:
    pictures(tmp_path, "1.png", "2.png")
    with pytest.raises(DataError, match=r"3\.pngx"):
        propose(table(tmp_path / "a.csv", "scan,label", "1.png,0", "2.png,1", "3.pngx,0"))
    rows = ('{"note": "a mass is seen", "label": "0"}', '{"note": "nothing is seen", "label": "1"}')
    empty = '{"note": null, "label": "1"}'
    assert propose(table(tmp_path / "b.jsonl", *rows, empty)).options["text"] == "note"


def test_names_numbers_and_dates_are_no_texts_unless_they_are_named(tmp_path: Path) -> None:
    rows = ("p-01,2024-01-03 10:15,12.5,1", "p-02,2024-02-01 09:30,8.0,0")
    file = table(tmp_path / "a.csv", "sample,taken,dose,label", *rows)
    with pytest.raises(DataError, match="no column of texts or images among sample, taken, dose, label"):
        propose(file)
    proposal = propose(file, text="taken")
    assert any(warning.startswith("column 'taken' has a single word or a number in") for warning in proposal.warnings)
    findings = table(
        tmp_path / "b.csv", "sample,taken,finding,label", *("a,2024-01-03,no mass,1", "b,2024-01-04,mass,0")
    )
    assert propose(findings).options["text"] == "finding"


def test_only_the_first_images_in_a_table_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (picture,) = pictures(tmp_path, "a.png").glob("*.png")
    # As `datasets` writes them: records, in more row groups than one.
    images = pa.table({"image": [{"bytes": picture.read_bytes(), "path": None}] * 192, "label": ["cat", "dog"] * 96})
    parquet.write_table(images, tmp_path / "scans.parquet", row_group_size=SAMPLE)
    reads: list[int] = []
    reading = parquet.ParquetFile.read_row_group

    def counted(self: Any, group: int, *given: Any, **more: Any) -> pa.Table:
        reads.append(group)
        return reading(self, group, *given, **more)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    options = proposed(tmp_path / "scans.parquet")
    assert (options["kind"], options["image"], options["labels"]) == ("images", "image", ["cat", "dog"])
    assert reads == [0]


def test_separator_of_a_spreadsheet_is_found_and_written(tmp_path: Path) -> None:
    file = table(tmp_path / "notes.csv", "text;label", "the cat, here;no", '"a; dog";yes')
    proposal = propose(file)
    assert proposal.options["separator"] == ";"
    assert "equally many columns, 2" in proposal.reasons["separator"]
    options = proposed(file, tokenizer=str(bert_tokenizer(tmp_path / "bert", ("the", "a", "cat"))))
    assert (options["separator"], options["labels"], loaded(options)) == (";", ["no", "yes"], [0, 1])
    pictures(tmp_path, "a.png", "b.png")
    options = proposed(table(tmp_path / "list.tsv", "image;label", "a.png;0", "b.png;1"))
    assert (options["separator"], loaded(options)) == (";", [0, 1])
    usual = table(tmp_path / "usual.csv", "text,label", "the cat,no", "a dog; here,yes")
    assert "separator" not in proposed(usual)


def test_doubtful_classes_and_empty_texts_are_warned_of_and_kept(tmp_path: Path) -> None:
    lines = ["the cat,benign", ",Benign ", "a dog,malignant", " ,BENIGN"]
    proposal = propose(table(tmp_path / "notes.csv", "text,label", *lines))
    assert proposal.options["labels"] == ["BENIGN", "Benign ", "benign", "malignant"]
    alike, empty = sorted(proposal.warnings)
    assert alike.startswith("'BENIGN' and 'Benign ' and 'benign' differ only by case or spaces: are these the same")
    assert empty.startswith("2 empty texts among the examples. Remove")
    for path in (
        table(tmp_path / "one.csv", "text,label", "the cat,benign", "a dog,benign"),
        pictures(tmp_path / "scans", "benign/a.png"),
    ):
        (single,) = propose(path).warnings
        assert single.startswith("there is a single class, 'benign'. Correct the data; or")
    assert not propose(table(tmp_path / "two.csv", "text,label", "the cat,0", "a dog,1")).warnings


def test_what_only_a_person_can_decide_is_refused_with_what_to_write(tmp_path: Path) -> None:
    csv = {
        "a,b,label": ("x y z,x y z,1", "a, b may all be the text: name it with --text"),
        "text,x": ("some text,1", "no obvious column of classes among text, x: name it with --label"),
        "text,label": ("some text,", "column 'label' has no value in 1 of 1 rows (0;"),
        "label": ("1", "no column of texts or images among label"),
    }
    told = {
        table(tmp_path / f"{place}.csv", head, row): what for place, (head, (row, what)) in enumerate(csv.items())
    }
    many = [f"text {place},{place}" for place in range(1001)]
    told[table(tmp_path / "many.csv", "text,label", *many)] = "has 1001 different values, which are hardly classes"
    told[pictures(tmp_path / "splits", "train/cat/a.png", "test/cat/a.png")] = "folders for splits (test, train)"
    told[pictures(tmp_path / "loose", "cat/a.png", "b.png")] = "b.png is not in the folder of a class"
    (tmp_path / "volumes").mkdir()
    (tmp_path / "volumes" / "a.nii").touch()
    told[tmp_path / "volumes"] = "but 1 .nii: convert images to PNG"
    told[tmp_path / "0.cvs"] = "there is no file or folder"
    for path, what in told.items():
        with pytest.raises(DataError) as refused:
            propose(path)
        assert what in str(refused.value)


def test_named_columns_are_taken(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "findings,impression,grade", "a b c,d e f,high", "g h i,j k l,low")
    options = proposed(path, text="impression", label="grade")
    assert (options["text"], options["label"], options["labels"]) == ("impression", "grade", ["high", "low"])
    for option in ("text", "label"):
        with pytest.raises(DataError, match=rf"^{option}: .* has no column 'x'"):
            propose(path, **{option: "x"})


def test_options_that_the_data_do_not_have_are_refused(tmp_path: Path) -> None:
    texts = table(tmp_path / "notes.csv", "text,label", "the cat,0", "a dog,1")
    cases: list[tuple[Path, dict[str, str], str]] = [
        (
            pictures(tmp_path / "scans", "a/a.png"),
            {"text": "report", "split": "train"},
            "leave out --split and --text",
        ),
        (texts, {"processor": "vit"}, "notes.csv is a table of texts: leave out --processor"),
        (tmp_path / "a.safetensors", {"label": "class"}, "holds prepared tensors: leave out --label"),
    ]
    (tmp_path / "a.safetensors").touch()
    for path, options, expected in cases:
        with pytest.raises(DataError, match=expected):
            propose(path, **options)


def test_odd_names_stay_within_their_line(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "a", 'x"\n[datasets.b]/1.png')
    assert proposed(folder)["labels"] == ['x"\n[datasets.b]']
    with pytest.raises(DataError, match="--name"):
        propose(folder).toml("a]")


@pytest.mark.parametrize(
    "column",
    [
        "Patient ID",
        "patient-id",
        "PATIENT_ID",
        "PatID",
        "Pat Nr",
        "subjectId",
        "Participant",
        "anon_patient_id",
        "MRN",
    ],
)
@pytest.mark.parametrize("images", [False, True])
def test_a_patient_is_held_out_as_one_however_the_column_is_spelt(
    tmp_path: Path, column: str, *, images: bool
) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    header, first = ("File Name,Class", "a.png") if images else ("Report Text,Class", "the left lung")
    cells = [f"{first},ill,p1", f"{first.replace('a', 'b')},well,p1", "c.png,ill,p2"]
    options = proposed(
        table(tmp_path / "list.csv", f"{header},{column}", *cells), **({} if images else {"text": "Report Text"})
    )
    assert (options["kind"], options["group"]) == ("images" if images else "text", column)
    assert options["label"] == "Class"


@pytest.mark.parametrize("column", ["Patient Age", "outpatient", "site_id", "Slice", "Hospital ID"])
def test_what_is_no_patient_does_not_hold_rows_together(tmp_path: Path, column: str) -> None:
    proposal = propose(table(tmp_path / "a.csv", f"text,label,{column}", "a b c,x,1", "d e f,y,1", "g h i,y,2"))
    assert "group" not in proposal.options
    assert not proposal.warnings


@pytest.mark.parametrize("column", ["caseId", "Lesion ID", "study_uid", "Accession Number"])
def test_identities_that_repeat_are_asked_about(tmp_path: Path, column: str) -> None:
    rows = ["a b c,x,1", "d e f,y,1", "g h i,y,2", "j k l,y,"]
    proposal = propose(table(tmp_path / "a.csv", f"text,label,{column}", *rows))
    assert "group" not in proposal.options
    (warning,) = proposal.warnings
    assert f"column {column!r} has 2 values in 3 examples" in warning
    assert f'Set group = "{column}"' in warning
    assert not propose(table(tmp_path / "b.csv", f"text,label,{column}", "a b c,x,1", "d e f,y,2")).warnings


def test_a_patient_in_the_names_of_images_is_held_out_as_one(tmp_path: Path) -> None:
    names = [
        f"{label}/patient{number}_scan{scan}.png" for number, label in ((1, "ill"), (12, "well")) for scan in (1, 2)
    ]
    folder = pictures(tmp_path / "scans", *names)
    options = proposed(folder)
    given = {name: value for name, value in options.items() if name != "kind"}
    assert list(load("images", given).groups or ()) == [b"patient1"] * 2 + [b"patient12"] * 2
    pictures(folder, "ill/other.png")
    proposal = propose(folder)
    assert "group" not in proposal.options
    assert "has 2 values in 4 examples" in proposal.warnings[0]


def test_the_patient_in_dicom_headers_is_held_out_as_one(tmp_path: Path) -> None:
    (tmp_path / "scans" / "ill").mkdir(parents=True)
    for number, patient in enumerate(("p1", "p1", "p2")):
        written(tmp_path / "scans" / "ill" / f"{number}.dcm", np.zeros((4, 6), np.uint16), PatientID=patient)
    assert proposed(tmp_path / "scans")["group"] == "PatientID"
    written(tmp_path / "scans" / "ill" / "2.dcm", np.zeros((4, 6), np.uint16), PatientID="p1")
    proposal = propose(tmp_path / "scans")
    assert "group" not in proposal.options
    assert "3 of the files have the same PatientID, 'p1'" in proposal.warnings[-1]


def test_classes_of_two_unicode_forms_are_one_and_sorted_alike_everywhere(tmp_path: Path) -> None:
    accent = "L\u00e9sion"
    other = unicodedata.normalize("NFD", accent)
    proposal = propose(table(tmp_path / "a.csv", "text,label", f"a b,{other}", "c d,Lz", f"e f,{accent}"))
    assert proposal.options["labels"] == ["Lz", accent]
    (warning,) = proposal.warnings
    assert f"{accent!r} is written in 2 Unicode forms" in warning
    assert loaded(proposed(tmp_path / "a.csv")) == [1, 0, 1]
    folders = propose(pictures(tmp_path / "scans", f"{other}/a.png", "Lz/b.png"))
    assert folders.options["labels"] == ["Lz", accent]
    assert loaded({name: value for name, value in folders.options.items() if name != "held_out"}) == [1, 0]


def test_images_are_found_under_another_unicode_form_of_their_names(tmp_path: Path) -> None:
    name, column = "Sch\u00e4del.png", unicodedata.normalize("NFD", "Bild\u00e4")
    pictures(tmp_path, unicodedata.normalize("NFD", name))
    file = table(tmp_path / "a.csv", f"{column},label", f"{name},0")
    options = {"file": str(file), "image": "Bild\u00e4", "size": 2}
    assert load("images", options).examples == 1


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(4, 1), pa.float32()])
def test_classes_that_a_missing_value_made_decimal_are_whole(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([1.0, 0.0, 1.0]).cast(kind)
    parquet.write_table(pa.table({"text": ["a b", "c d", "e f"], "label": values}), tmp_path / "a.parquet")
    options = proposed(tmp_path / "a.parquet")
    assert "labels" not in options
    assert loaded(options) == [1, 0, 1]
    parquet.write_table(
        pa.table({"text": ["a", "b"], "label": pa.array([1.0, None]).cast(kind)}), tmp_path / "b.parquet"
    )
    with pytest.raises(DataError, match=r"column 'label' has no value in 1 of 2 rows \(1; the first row is 0\)"):
        propose(tmp_path / "b.parquet")


def test_truth_values_are_classes_of_the_same_names_in_every_form(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a b", "c d"], "label": [True, False]}), tmp_path / "a.parquet")
    files = [
        tmp_path / "a.parquet",
        table(tmp_path / "a.jsonl", '{"text": "a b", "label": true}', '{"text": "c d", "label": false}'),
        table(tmp_path / "a.csv", "text,label", "a b,True", "c d,False"),
    ]
    for options in map(proposed, files):
        assert options["labels"] == ["false", "true"]
        assert loaded(options) == [1, 0]


def test_several_labels_of_an_example_are_proposed_from_lists_and_from_columns(tmp_path: Path) -> None:
    of_lines = ('{"text": "a b c", "label": ["x", "y"]}', '{"text": "d e f", "label": []}')
    options = proposed(table(tmp_path / "a.jsonl", *of_lines))
    assert (options["problem_type"], options["head"], options["labels"]) == (
        "multi_label", "text-classification", ["x", "y"],
    )  # fmt: skip
    assert loaded(options) == [[1, 1], [0, 0]]  # type: ignore[comparison-overlap]
    options = proposed(table(tmp_path / "a.csv", "text,label", 'a b c,"[""x"", ""y""]"', "d e f,[]"))
    assert loaded(options) == [[1, 1], [0, 0]]  # type: ignore[comparison-overlap]
    columns = table(tmp_path / "b.csv", "patient,text,y,x", "p1,a b c,1,0", "p2,d e f,true,1.0")
    options = proposed(columns)
    assert (options["label_columns"], options["labels"], options["group"]) == (True, ["y", "x"], "patient")
    assert loaded(options) == [[1, 0], [1, 1]]  # type: ignore[comparison-overlap]
    # One column more, which is no label, is a question.
    with pytest.raises(DataError, match="has no obvious column of classes"):
        propose(table(tmp_path / "c.csv", "text,y,x,ward", "a b c,1,0,A", "d e f,0,1,B"))
    pictures(tmp_path, "a.png", "b.png")
    options = proposed(table(tmp_path / "d.csv", "image,label", 'a.png,"[""x""]"', 'b.png,"[""y""]"'))
    assert (options["kind"], options["problem_type"]) == ("images", "multi_label")
    assert loaded(options) == [[1, 0], [0, 1]]  # type: ignore[comparison-overlap]


def test_numbers_with_a_fraction_are_the_targets_of_a_regression(tmp_path: Path) -> None:
    options = proposed(table(tmp_path / "a.csv", "text,label", "a b c,61", "d e f,62.5"))
    assert options["problem_type"] == "regression"
    assert "labels" not in options
    assert loaded(options) == [61.0, 62.5]
    # Whole numbers are classes, in any form.
    assert "problem_type" not in proposed(table(tmp_path / "b.csv", "text,label", "a b c,1.0", "d e f,0.0"))


def test_spans_of_characters_are_entities(tmp_path: Path) -> None:
    spans = '[{"start": 0, "end": 1, "label": "drug"}]'
    options = proposed(
        table(tmp_path / "a.jsonl", f'{{"text": "a b c", "label": {spans}}}', '{"text": "d e", "label": []}')
    )
    assert options["spans"] is True
    assert (options["head"], options["labels"]) == ("token-classification", ["O", "B-drug", "I-drug"])
    quoted = spans.replace('"', '""')
    options = proposed(table(tmp_path / "a.csv", "text,label", f'a b c,"{quoted}"', "d e f,[]"))
    assert options["spans"] is True


def test_several_labels_of_a_text_are_refused_or_warned_of(tmp_path: Path) -> None:
    lists = '{"text": ["a", "b", "c"], "label": ["x", "y"]}', '{"text": ["d", "e"], "label": ["x"]}'
    with pytest.raises(DataError, match="column 'label' has lists of other lengths than the texts have words"):
        propose(table(tmp_path / "a.jsonl", *lists))
    with pytest.raises(DataError, match="column 'label' has a list in row 1"):
        propose(table(tmp_path / "b.csv", "text,label", "a b c,x", "d e f,\"['x', 'y']\""))
    options = proposed(table(tmp_path / "c.csv", "text,label", "a b,x", "c d,y", "e f,x;y"))
    ((detail, _),) = load("text", {k: v for k, v in options.items() if k != "kind"}).report.warnings()
    assert "'x;y' may be several classes" in detail
    assert any("'x;y' may be several classes" in warning for warning in propose(tmp_path / "c.csv").warnings)


def test_words_for_missing_values_among_classes_are_asked_about(tmp_path: Path) -> None:
    (warning,) = propose(table(tmp_path / "a.csv", "text,label", "a b,NA", "c d,ill")).warnings
    assert "'NA' may stand for a missing value" in warning


def test_columns_that_may_be_classes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"name it with --label \(grade has few values\)"):
        propose(table(tmp_path / "a.csv", "text,grade,n", *(f"a b c,{n % 2},{n}" for n in range(9))))


def test_a_tables_texts_are_not_cut_by_a_default_that_nobody_saw(tmp_path: Path) -> None:
    notes = table(tmp_path / "notes.csv", "text,label", f"{'the cat ' * 80}end,a", "the dog,b")
    own = str(bert_tokenizer(tmp_path / "bert", ("the", "cat", "dog")))
    # 161 words, with [CLS] and [SEP], and rounded up to a multiple of 8.
    assert proposed(notes, tokenizer=own)["max_length"] == 168
    assert proposed(notes)["max_length"] == 328
    limited = propose(notes, tokenizer=str(bert_tokenizer(tmp_path / "small", ("the", "cat"), model_max_length=100)))
    assert limited.options["max_length"] == 100
    assert (
        "has 163 tokens, and 1 have more than max_length, 100, beyond which they are cut off" in limited.warnings[0]
    )


def test_a_column_that_is_named_without_its_spaces_is_not_taken_for_another_one(tmp_path: Path) -> None:
    lines = ("case id ,label ,class", "7,the first case is well,a", "7,the other one is not,b", "8,this is well,a")
    file = table(tmp_path / "notes.csv", *lines)
    options = proposed(file, text="label")
    assert (options["text"], options["label"], options["labels"]) == ("label ", "class", ["a", "b"])
    given = {"file": str(file), "text": "label", "label": "case id", "labels": ["7", "8"], "tokenizer": "run"}
    assert list(load("text", given).report.ungrouped) == []
