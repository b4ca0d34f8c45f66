"""Texts from files: numbered alike at every site, nothing fetched, nothing left behind, and faults by their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import BertConfig

from tessera.shared.model.dataset_schema import name_digests
from tessera.shared.model.preprocessing import vocabulary_in
from tessera.shared.model.spec import Head
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.load_report import Truncation
from tessera.worker.data.partition.schemes import Iid
from tessera.worker.data.readers.tokenizer import MAX_TOKENS
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward
from tests.support.pretrained import CLS, PAD, SEP, UNK, bert_tokenizer, plain_tokenizer

WORDS = ("the", "cat", "dog", "sat", "ran", "##ning")
THE, CAT, DOG, SAT, RAN, NING = range(4, 10)

LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 16}


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return str(bert_tokenizer(tmp_path / "bert", WORDS))


def written(file: Path, *lines: str) -> str:
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def refusal(**options: Any) -> str:
    with pytest.raises(DataError) as refused:
        load("text", options)
    return str(refused.value)


def loss(head: Head, config: dict[str, Any], dataset: Dataset) -> float:
    """What a small model makes of all of it: that the inputs are those that such a model takes."""
    model = instantiate(config, head, seed=0)
    (batch,) = dataset.batches(None)
    return float(forward(model, head, batch).loss.detach())


# ---------------------------------------------------------------- tokenizers


def test_folder_without_vocabulary_is_no_tokenizer(tmp_path: Path) -> None:
    BertConfig(hidden_size=8).save_pretrained(tmp_path / "model")
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    refused = refusal(file=file, tokenizer=str(tmp_path / "model"))
    assert refused.startswith(f"tokenizer: {tmp_path / 'model'} has no vocabulary, only 5 special tokens")
    assert "tokenizer.json or vocab.txt" in refused


def test_share_of_unknown_tokens_is_reported_and_texts_without_a_known_word_are_refused(
    tmp_path: Path, bert: str
) -> None:
    # [CLS], [SEP] and padding stand for no text.
    for first, share, warnings in (
        ("the bird", 1 / 3, ["the tokenizer does not know 33% of the tokens"]),
        ("the bird the cat", 1 / 5, []),
        ("the cat", 0, []),
    ):
        file = written(tmp_path / "notes.csv", "text,label", f"{first},0", "dog,1")
        report = load("text", {"file": file, "tokenizer": bert}).report
        assert report.unknown_tokens == share
        assert [detail for detail, _ in report.warnings()] == warnings
    file = written(tmp_path / "notes.csv", "text,label", "katze,0", "hund,1")
    assert "every token is unknown" in refusal(file=file, tokenizer=bert)


def test_empty_texts_are_examples_that_the_report_counts(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.csv", "text,other,label", "the cat,,0", ",the,0", '" ",dog,1')
    for options, count in (({}, 2), ({"second_text": "other"}, 3), ({"head": "causal-lm"}, 2)):
        dataset = load("text", {"file": file, "tokenizer": bert, **options})
        assert dataset.examples == 3
        ((warning, remedy),) = dataset.report.warnings()
        assert warning == f"{count} empty texts among the examples"
        assert remedy.startswith("Remove these rows, or fill them in")


def test_a_vocabulary_is_declared_unless_the_run_brings_it(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    declared = load("text", {"file": file, "tokenizer": bert}).schema.vocabulary
    # That of the file which travels with a model.
    assert declared == vocabulary_in((Path(bert) / "tokenizer.json").read_bytes()) is not None
    assert load("text", {"file": file, "tokenizer": "run"}).schema.vocabulary is None
    other = bert_tokenizer(tmp_path / "other", WORDS[::-1])
    assert load("text", {"file": file, "tokenizer": str(other)}).schema.vocabulary not in (None, declared)


def test_tokenizer_that_ends_texts_with_its_unknown_token_has_no_share(tmp_path: Path) -> None:
    plain = plain_tokenizer(tmp_path / "plain", WORDS, unk_token="<end>")
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    assert load("text", {"file": file, "tokenizer": str(plain)}).report.unknown_tokens is None


# ---------------------------------------------------------------- to classify


def test_texts_become_tokens_and_their_labels_the_numbers_of_their_names(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the cat,animal", '"ran, the dog sat",deed', "the,animal")
    dataset = load("text", {"file": file, "tokenizer": bert, "labels": ["deed", "animal"]})
    assert dataset.tensors["labels"].tolist() == [1, 0, 1]
    first, longest, _ = dataset.tensors["input_ids"].tolist()
    assert longest == [CLS, RAN, 1, THE, DOG, SAT, SEP]  # the comma is unknown
    assert first == [CLS, THE, CAT, SEP, PAD, PAD, PAD]
    assert dataset.tensors["attention_mask"].sum(dim=1).tolist() == [4, 7, 3]
    assert set(dataset.tensors) == {"input_ids", "attention_mask", "labels"}
    config = {"model_type": "distilbert", "n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 8, "vocab_size": 16}
    assert loss("text-classification", config, dataset) > 0
    assert (dataset.schema.classes, dataset.schema.class_names) == (2, name_digests(["deed", "animal"]))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("head", ["text-classification", "causal-lm"])
def test_under_privacy_no_shape_tells_how_long_the_longest_text_is(tmp_path: Path, head: Head, side: str) -> None:
    bert = str(bert_tokenizer(tmp_path / "bert", WORDS, padding_side=side))
    padded = []
    for longest in ("the cat", "the dog sat"):
        file = written(tmp_path / "notes.csv", "text,label", "the cat,0", f"{longest},1")
        padded.append(load("text", {"file": file, "tokenizer": bert, "head": head, "max_length": 8}).padded())
    per_token = " [8]" if head == "causal-lm" else " []"
    declared = f"attention_mask int64 [8], input_ids int64 [8], labels int64{per_token}"
    assert [str(each.schema) for each in padded] == [declared] * 2
    # What another text is changes nothing of the first one, which is as long as any may be.
    first, second = ({name: tensor[0].tolist() for name, tensor in each.tensors.items()} for each in padded)
    assert first == second
    # Always on the right, whatever the tokenizer says.
    whole = [CLS, THE, CAT, SEP]
    assert first["input_ids"] == whole + [PAD] * 4
    assert first["attention_mask"] == [1] * 4 + [0] * 4
    if head == "causal-lm":
        assert first["labels"] == whole + [-100] * 4


def test_what_is_held_out_and_a_part_know_how_long_a_text_may_be(tmp_path: Path, bert: str) -> None:
    lines = [f"{'the ' * row}cat,{row % 2}" for row in range(1, 9)]
    file = written(tmp_path / "notes.csv", "text,label", *lines)
    options = {"file": file, "tokenizer": bert, "max_length": 12}
    part = Iid(scheme="iid", count=2, index=0)
    dataset = load("text", options, part=part, held_out=0.5, key=b"the same each time")
    assert dataset.padded().tensors["input_ids"].shape == (dataset.examples, 12)
    assert dataset.held_out is not None
    assert [one.schema.inputs["input_ids"].shape for one in (dataset, dataset.held_out)] == [(12,), (12,)]


def test_a_second_text_is_told_apart_by_its_token_types(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "pairs.tsv", "a\tb\tlabel", "the cat\tsat\t0", "the\tdog\t1")
    options = {"file": file, "tokenizer": bert, "text": "a", "second_text": "b"}
    dataset = load("text", options)
    assert dataset.tensors["input_ids"][0].tolist() == [CLS, THE, CAT, SEP, SAT, SEP]
    assert "token_type_ids" not in dataset.schema.inputs
    assert dataset.tensors["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert loss("text-classification", {"model_type": "bert", "intermediate_size": 8, **LAYERS}, dataset) > 0


def test_long_texts_are_cut_at_max_length(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "long.csv", "text,label", "the cat sat the cat sat,0")
    dataset = load("text", {"file": file, "tokenizer": bert, "max_length": 5})
    assert dataset.tensors["input_ids"].tolist() == [[CLS, THE, CAT, SAT, SEP]]


@pytest.mark.parametrize("head", ["text-classification", "token-classification"])
def test_what_is_cut_off_is_counted_in_texts_and_tokens(tmp_path: Path, bert: str, head: Head) -> None:
    tags = [["0"], ["0 0 0 0 0 0", "0 0"]][head == "token-classification"]
    rows = (f"{text},{tag}" for text, tag in zip(("the cat sat ran sat dog", "the cat"), tags * 2, strict=False))
    file = written(tmp_path / "notes.csv", "text,label", *rows)
    options = {"file": file, "head": head, "labels": ["0"], "max_length": 5}
    report = load("text", {**options, "tokenizer": bert}).report
    # 8 and 4 tokens with [CLS] and [SEP].
    assert report.truncation == Truncation(texts=2, cut=1, longest=8, limit=5, lost=3 / 12, most=MAX_TOKENS)
    # Before a run brings its tokenizer, each word has at least one token.
    ((told, remedy),) = load("text", {**options, "tokenizer": "run"}).report.warnings()
    assert told == "1 of 2 texts have more words than max_length, 5, takes tokens; the longest has 6"
    limited = bert_tokenizer(tmp_path / "limited", WORDS, model_max_length=5)
    ((_, remedy),) = load("text", {**options, "tokenizer": str(limited), "max_length": 8}).report.warnings()
    assert remedy == "Divide these texts: the tokenizer or its model takes no more."


@pytest.mark.parametrize("tokenizer", ["run", "own"])
@pytest.mark.parametrize("head", ["text-classification", "token-classification", "causal-lm"])
def test_a_text_that_no_tokenizer_reads_is_named_by_its_row_before_any_run(
    tmp_path: Path, bert: str, tokenizer: str, head: Head
) -> None:
    tag = "0" if head == "text-classification" else "0 0"
    rows = (f'{{"text": "{text}", "label": "{tag}"}}' for text in ("the cat", "the \\ud800"))
    file = written(tmp_path / "notes.jsonl", *rows)
    refused = refusal(file=file, head=head, tokenizer="run" if tokenizer == "run" else bert)
    assert f"text: row 1 of {file} has half of a surrogate pair" in refused


def test_parquet_and_json_lines_hold_the_same_as_csv(tmp_path: Path, bert: str) -> None:
    rows = {"text": ["the cat", "the dog ran"], "label": [1, 0], "from": ["north", "south"]}
    pq.write_table(pa.table(rows), tmp_path / "notes.parquet")
    lines = [json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)]
    files = [
        str(tmp_path / "notes.parquet"),
        written(tmp_path / "notes.jsonl", *lines),
        written(tmp_path / "notes.csv", "text,label,from", "the cat,1,north", "the dog ran,0,south"),
    ]
    for file in files:
        dataset = load("text", {"file": file, "tokenizer": bert, "domain": "from"})
        assert dataset.tensors["labels"].tolist() == [1, 0]
        assert dataset.tensors["input_ids"][0].tolist() == [CLS, THE, CAT, SEP, PAD]
        assert dataset.domains is not None
        assert dataset.domains.tolist() == [0, 1]


def test_a_json_line_means_the_same_whatever_the_others_hold(tmp_path: Path, bert: str) -> None:
    lines = ('{"text": "the cat", "label": "1", "from": "2020-01-01"}', '{"text": 7, "label": 0, "from": 2020}')
    file = written(tmp_path / "notes.jsonl", *lines)
    dataset = load("text", {"file": file, "tokenizer": bert, "domain": "from"})
    # With quotes around it, the first text would begin with an unknown word.
    assert dataset.tensors["input_ids"].tolist() == [[CLS, THE, CAT, SEP], [CLS, UNK, SEP, PAD]]
    assert dataset.tensors["labels"].tolist() == [1, 0]
    assert dataset.domains is not None
    assert dataset.domains.tolist() == [1, 0]  # "2020" comes before "2020-01-01"


@pytest.mark.parametrize("name", ["none.csv", "none.tsv", "none.jsonl", "none.parquet"])
def test_a_table_without_rows_is_refused_as_such(tmp_path: Path, bert: str, name: str) -> None:
    file = tmp_path / name
    if file.suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}), file)
    else:
        file.write_text({".csv": "text,label\n", ".tsv": "text\tlabel\n\n", ".jsonl": "\n"}[file.suffix])
    assert (
        refusal(file=str(file), tokenizer=bert)
        == f"file: {file} cannot be read: it has no rows; correct it, or name another"
    )


def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, bert: str) -> None:
    good = '{"text": "the", "label": 0}'
    file = written(tmp_path / "notes.jsonl", good, "", "[1]")
    assert "cannot be read: line 3 is not a JSON object" in refusal(file=file, tokenizer=bert)
    file = written(tmp_path / "notes.jsonl", good, '{"text":')
    assert "cannot be read: line 2: Expecting value" in refusal(file=file, tokenizer=bert)


def test_a_number_that_can_be_no_class_is_refused_and_zeros_before_one_count_for_nothing(
    tmp_path: Path, bert: str
) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the,99999999999999999999", "the,100000", "the,0000000007")
    assert "has '100000', '99999999999999999999'; list the classes' names" in refusal(file=file, tokenizer=bert)
    file = written(tmp_path / "notes.csv", "text,label", "the,99999", "the,0000000007", "the,000")
    assert load("text", {"file": file, "tokenizer": bert}).tensors["labels"].tolist() == [99999, 7, 0]


def test_several_files_are_one_data_set(tmp_path: Path, bert: str) -> None:
    files = [written(tmp_path / f"{part}.csv", "text,label", f"the cat,{part}") for part in (1, 0)]
    assert load("text", {"file": files, "tokenizer": bert}).tensors["labels"].tolist() == [1, 0]


def test_files_with_their_columns_in_another_order_are_refused(tmp_path: Path, bert: str) -> None:
    first = written(tmp_path / "a.csv", "text,label", "the cat,1")
    second = written(tmp_path / "b.csv", "label,text", "1,the cat")
    assert "do not have the same columns" in refusal(file=[first, second], tokenizer=bert)


def test_a_column_without_a_name_is_no_trouble_to_the_others(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.csv", ",text,label", "0,the cat,1", "1,the,0")
    assert load("text", {"file": file, "tokenizer": bert}).tensors["labels"].tolist() == [1, 0]


def test_what_a_csv_file_says_is_text_whatever_it_looks_like(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the,NA", "cat,None", "dog,007", "ran,True")
    names = ["NA", "None", "007", "True"]
    assert load("text", {"file": file, "tokenizer": bert, "labels": names}).tensors["labels"].tolist() == [0, 1, 2, 3]


def test_nothing_is_left_behind_in_home_or_temporary_folder(
    tmp_path: Path, bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    monkeypatch.setattr("tempfile.tempdir", None)  # which remembers another
    load("text", {"file": file, "tokenizer": bert})
    assert [*(tmp_path / "HOME").iterdir(), *(tmp_path / "TMPDIR").iterdir()] == []


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("labels", "values", "told"),
    [
        (["no", "yes"], ["yes", "maybe"], r"has 'maybe', not among the 2 names in `labels`"),
        (["no", "yes"], ["1", "2"], r"has '2', not among"),
        (["no", "yes"], ["1", ""], r"has no value in 1 row, first in row 1: fill it in"),
        (["1", "2"], ["1", "0"], r"has '0', not among"),  # where names are numbers, a number is a name
        (None, ["1", "-1"], r"has '-1'; list the classes' names"),
        (None, ["1", "yes"], r"has 'yes'; list the classes' names"),
        (None, list("abcdefghijkl"), r"'h' and 4 more; list"),
    ],
)
def test_labels_that_no_number_stands_for_are_named(
    tmp_path: Path, bert: str, labels: list[str] | None, values: list[str], told: str
) -> None:
    file = written(tmp_path / "notes.csv", "text,label", *(f"the cat,{value}" for value in values))
    found = refusal(file=file, tokenizer=bert, labels=labels)
    assert found.startswith(f"label: {file}")
    assert told in found


def test_a_name_that_is_a_number_is_that_class_and_numbers_go_with_other_names(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the,1", "cat,0")
    for labels, numbers in ((["1", "0"], [0, 1]), (["no", "yes"], [1, 0])):
        dataset = load("text", {"file": file, "tokenizer": bert, "labels": labels})
        assert dataset.tensors["labels"].tolist() == numbers


# ---------------------------------------------------------------- to tag, and to go on from


def test_a_words_tag_is_asked_of_its_first_piece_alone(tmp_path: Path, bert: str) -> None:
    lines = [{"words": ["the", "running", "dog"], "tags": ["O", "B", "O"]}, {"words": ["cat"], "tags": ["B"]}]
    file = written(tmp_path / "tags.jsonl", *map(json.dumps, lines))
    options = {
        "file": file,
        "tokenizer": str(bert_tokenizer(tmp_path / "pieces", ("the", "run", "dog", "cat", "##ning"))),
        "head": "token-classification",
        "text": "words",
        "label": "tags",
        "labels": ["O", "B"],
    }
    dataset = load("text", options)
    # [CLS] the run ##ning dog [SEP], and [CLS] cat [SEP]
    assert dataset.tensors["labels"].tolist() == [[-100, 0, 1, -100, 0, -100], [-100, 1, -100, -100, -100, -100]]
    assert loss("token-classification", {"model_type": "bert", "intermediate_size": 8, **LAYERS}, dataset) > 0


def test_a_row_of_which_nothing_is_left_to_ask_is_named(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "tags.csv", "text,label", "the cat,0 1")
    options = {"file": file, "tokenizer": bert, "head": "token-classification"}
    assert load("text", {**options, "max_length": 3}).tensors["labels"].tolist() == [[-100, 0, -100]]
    # [CLS] and [SEP] take both.
    assert f"max_length: row 0 of {file} has no word in its first 2 tokens" in refusal(**options, max_length=2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_that_are_not_made_tokens_of_together_are_padded_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    tokenizer = str(bert_tokenizer(tmp_path / "sided", WORDS, padding_side=side))
    rows = [("the running dog sat", "0 1 0 0"), ("cat", "1"), ("the cat", "0 1"), ("ran ran ran", "1 1 1")]
    tags = written(tmp_path / "tags.csv", "text,label,more", *(f"{text},{tag},the" for text, tag in rows))
    pairs = written(tmp_path / "pairs.csv", "text,more,label", *(f"{text},the,0" for text, _ in rows))
    for options in (
        {"file": tags, "head": "token-classification"},
        {"file": pairs, "second_text": "more"},
    ):
        monkeypatch.setattr("tessera.worker.data.readers.tokenizer.AT_ONCE", 4096)
        together = load("text", {**options, "tokenizer": tokenizer}).tensors
        monkeypatch.setattr("tessera.worker.data.readers.tokenizer.AT_ONCE", 1)
        apart = load("text", {**options, "tokenizer": tokenizer}).tensors
        assert {name: tensor.tolist() for name, tensor in apart.items()} == {
            name: tensor.tolist() for name, tensor in together.items()
        }


def test_words_and_tags_in_a_csv_file_have_spaces_between(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "tags.csv", "text,label", "the cat,0 1")
    dataset = load("text", {"file": file, "tokenizer": bert, "head": "token-classification"})
    assert dataset.tensors["labels"].tolist() == [[-100, 0, 1, -100]]
    written(tmp_path / "tags.csv", "text,label", "the cat,0 1", "dog,0 0")
    assert "label: row 1" in refusal(file=file, tokenizer=bert, head="token-classification")


def test_going_on_from_a_text_pads_with_its_end_and_asks_nothing_of_the_padding(tmp_path: Path) -> None:
    plain = str(plain_tokenizer(tmp_path / "plain", ("the", "cat", "sat")))  # <end> is 1, the words 2, 3 and 4
    file = written(tmp_path / "lines.csv", "text", "the cat sat", "cat sat")
    dataset = load("text", {"file": file, "tokenizer": plain, "head": "causal-lm"})
    # The model learns that a text ends.
    assert dataset.tensors["input_ids"].tolist() == [[2, 3, 4, 1], [3, 4, 1, 1]]
    assert dataset.tensors["labels"].tolist() == [[2, 3, 4, 1], [3, 4, 1, -100]]
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 8}
    assert loss("causal-lm", config, dataset) > 0
    written(tmp_path / "lines.csv", "text", "the cat sat", '" "')
    assert "text: row 1" in refusal(file=file, tokenizer=plain, head="causal-lm")


def test_a_text_that_is_cut_has_no_end_and_none_has_two(tmp_path: Path) -> None:
    words = ("the", "cat", "sat")
    plain = str(plain_tokenizer(tmp_path / "plain", words))
    file = written(tmp_path / "lines.csv", "text", "the cat sat", "the cat sat the", "cat sat <end>", "cat")
    dataset = load("text", {"file": file, "tokenizer": plain, "head": "causal-lm", "max_length": 3})
    assert dataset.tensors["input_ids"].tolist() == [[2, 3, 4], [2, 3, 4], [3, 4, 1], [3, 1, 1]]
    assert dataset.tensors["labels"].tolist()[-1] == [3, 1, -100]
    ((cut, remedy),) = dataset.report.warnings()
    assert cut == "2 of 4 texts are longer than 3 tokens, the longest 5: 21.4% of all tokens are cut off"
    assert remedy.startswith("Set max_length = 5 if memory allows")
    written(tmp_path / "lines.csv", "text", "the cat sat")
    endless = str(plain_tokenizer(tmp_path / "endless", words, eos_token=None, pad_token="<unk>"))
    found = load("text", {"file": file, "tokenizer": endless, "head": "causal-lm"}).report.warnings()
    assert "the tokenizer has no end-of-text token" in "".join(detail for detail, _ in found)
    assert not list(load("text", {"file": file, "tokenizer": "run", "head": "causal-lm"}).report.warnings())


# ---------------------------------------------------------------- what is wrong is named


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "file: there is no file"),
        ("", "cannot be read: it is empty"),
        ("text,label\n", "cannot be read"),
        ('text,label\n"a\na",b\na,b,c\n', "line 4 of notes.csv has 3 cells for 2 columns: put a text that"),
        ("text,label\na,b,c\na,b,c\n", "line 2 of notes.csv has 3 cells for 2 columns"),
        ('text,label\na,b\na,"b\n', "line 3 of notes.csv has a quotation mark that is not closed"),
        ('text,label\n"a "quoted, b" c",d\n', "line 2 of notes.csv has a quotation mark"),
        ("text,label\n\x00\xff\n", "file: "),
        ("texts,label\na,0\n", "has no column 'text'; did you mean `texts`?"),
        ("text,class\nthe,0\n", "label: "),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_named(
    tmp_path: Path, bert: str, content: str | None, told: str
) -> None:
    file = tmp_path / "notes.csv"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    found = refusal(file=str(file), tokenizer=bert)
    assert told in found
    assert str(file) in found


def test_nonsense_in_the_other_formats_is_refused_in_one_line(tmp_path: Path, bert: str) -> None:
    for name in ("notes.parquet", "notes.jsonl"):
        found = refusal(file=written(tmp_path / name, '{"text":', "x"), tokenizer=bert)
        assert found.startswith(f"file: {tmp_path / name} cannot be read")
        assert "\n" not in found
    found = refusal(file=written(tmp_path / "notes.pkl", "x"), tokenizer=bert)
    assert "end in one of .csv, .tsv, .parquet, .jsonl, .ndjson" in found
    found = refusal(file=written(tmp_path / "notes.xlsx", "x"), tokenizer=bert)
    assert found.endswith("save a spreadsheet as CSV (UTF-8)")


def test_a_text_that_is_missing_is_named_by_its_row(tmp_path: Path, bert: str) -> None:
    file = written(tmp_path / "notes.jsonl", '{"text": "the", "label": 0}', '{"text": null, "label": 1}')
    assert f"text: row 1 of {file} has no text" in refusal(file=file, tokenizer=bert)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tokenizer": "/nowhere/at/all"}, "tokenizer: there is no file or folder /nowhere/at/all"),
        ({"labels": ["a", "a"]}, "labels: named twice: a"),
        ({"second_text": "text", "head": "causal-lm"}, "second_text: needs head text-classification"),
        ({"max_length": 0}, "max_length"),
        ({"lables": []}, "lables"),
        ({"head": "masked-lm"}, "head"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, bert: str, options: dict[str, Any], told: str) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    assert told in refusal(**{"file": file, "tokenizer": bert, **options})


def test_a_tokenizer_that_cannot_be_used_is_named_by_its_folder(tmp_path: Path) -> None:
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"tokenizer: {empty} cannot be loaded" in refusal(file=file, tokenizer=str(empty))
    padless = plain_tokenizer(tmp_path / "padless", WORDS, eos_token=None)
    assert "has no padding token" in refusal(file=file, tokenizer=str(padless))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}})
    )
    (tmp_path / "code" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "tokenizer: " in refusal(file=file, tokenizer=str(tmp_path / "code"))
    assert not (tmp_path / "ran").exists()


def test_a_name_that_is_no_folder_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = written(tmp_path / "notes.csv", "text,label", "the cat,0")
    assert "tokenizer: tiny/bert@v1 cannot be loaded" in refusal(file=file, tokenizer="tiny/bert@v1")


def test_a_text_that_is_there_with_two_classes_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na b,0\nc d,1\na b,1\nc d,1\na b,0\n")
    report = load("text", {"file": str(tmp_path / "a.csv"), "tokenizer": "run"}).report
    assert [detail for detail, _ in report.warnings()] == ["1 example is there again with another class"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "['the', 'cat']", "label": "0 0"}, "text: a list was written as text"),
        ({"text": "the cat", "label": "['0', '0']"}, "text: a list was written as text"),
        ({"text": ["the", None], "label": [0, 0]}, "text: row 0 of .* has a word that is not text"),
        ({"text": ["the", "cat"], "label": [0, None]}, "label: .* has no value in 1 row, first in row 0"),
    ],
)
def test_words_that_are_not_there_are_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    options = {"file": str(tmp_path / "a.jsonl"), "head": "token-classification", "tokenizer": "run"}
    with pytest.raises(DataError, match=reason):
        load("text", options)


def test_a_text_that_is_no_number_is_not_the_word_nan(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": NaN, "label": 0}\n')
    with pytest.raises(DataError, match=r"text: row 0 of .* has no text"):
        load("text", {"file": str(tmp_path / "a.jsonl"), "tokenizer": "run"})
