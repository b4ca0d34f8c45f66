"""Tables and tokens that are made once, in a folder of the worker's, and read for each batch."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from pyarrow import parquet

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.schemes import Iid
from tessera.worker.data.prepared import PreparedFolder, mapped
from tessera.worker.data.readers.arrow_rows import written_rows
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tests.support.cli import forked
from tests.support.paths import ROOT
from tests.support.pretrained import bert_tokenizer, plain_tokenizer

WORDS = ("the", "cat", "dog", "sat", "ran", "##ning")
ROWS = [
    {
        "text": " ".join(WORDS[place % 5] for place in range(number, number + 1 + number % 4 + 1)),
        "other": "the dog",
        "label": number % 2,
        "tags": [place % 2 for place in range(number % 4 + 2)],
        "patient": f"p{number // 3}",
    }
    for number in range(40)
]
HEADS: dict[str, dict[str, Any]] = {
    "classes": {},
    "pairs": {"second_text": "other"},
    "words": {"head": "token-classification", "text": "words", "label": "tags"},
    "language": {"head": "causal-lm"},
}


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return str(bert_tokenizer(tmp_path / "bert", WORDS))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "notes.jsonl"
    file.write_text("".join(json.dumps({**row, "words": row["text"].split()}) + "\n" for row in ROWS))
    return file


def of(dataset: Dataset) -> list[dict[str, Any]]:
    """The batches of two passes in an order that is drawn."""
    dice = torch.Generator().manual_seed(1)
    return [{n: t.tolist() for n, t in sorted(b.items())} for _ in range(2) for b in dataset.batches(7, dice)]


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("head", HEADS)
def test_tokens_on_disk_give_the_batches_of_those_in_memory(
    tmp_path: Path, table: Path, head: str, side: str
) -> None:
    tokenizer = bert_tokenizer(tmp_path / "sided", WORDS, padding_side=side)
    options = {"file": str(table), "tokenizer": str(tokenizer), "group": "patient", "max_length": 6, **HEADS[head]}
    part = Iid(scheme="iid", count=2, index=0)
    kept, stored = (
        load("text", {**options, "in_memory": memory}, part=part, held_out=0.4, key=b"k") for memory in (True, False)
    )
    assert stored.on_disk
    assert stored.on_disk.kinds.keys() == {"input_ids", "attention_mask"} | (
        {"labels"} if head in ("words", "language") else {"token_type_ids"} if head == "pairs" else set()
    )
    assert not kept.on_disk
    assert of(stored) == of(kept)
    assert stored.held_out
    assert kept.held_out
    assert of(stored.held_out) == of(kept.held_out)
    assert list(stored.identities()) == list(kept.identities())
    assert list(stored.split_keys()) == list(kept.split_keys())
    assert stored.schema == kept.schema
    # Under privacy texts are padded to what the settings fix.
    assert of(stored.padded()) == of(kept.padded())
    assert stored.padded().inputs["input_ids"].shape == (kept.examples, 6)


def test_table_and_tokens_are_made_once_and_again_when_the_table_changes(
    tmp_path: Path, table: Path, bert: str
) -> None:
    prepared = PreparedFolder(tmp_path / "state" / "notes")
    options = {"file": str(table), "tokenizer": bert, "in_memory": False}
    first = load("text", options, prepared=prepared)
    made = files(prepared.folder or table)
    assert [name.partition("-")[0] for name in made] == ["table", "tokens"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state" / "notes").iterdir()} == {0o600}
    again = load("text", options, prepared=prepared)
    assert files(tmp_path / "state" / "notes") == made
    assert of(again) == of(first)
    # What another tokenizer or another length made is removed, and so is what a killed worker left.
    (tmp_path / "state" / "notes" / "tessera-left").mkdir()
    load("text", {**options, "max_length": 4}, prepared=prepared)
    shorter = files(tmp_path / "state" / "notes")
    assert len(shorter) == 2
    assert len(shorter.keys() & made.keys()) == 1
    table.write_text(table.read_text() + json.dumps({"text": "cat", "label": 0}) + "\n")
    changed = load("text", options, prepared=prepared)
    assert changed.examples == first.examples + 1
    assert not files(tmp_path / "state" / "notes").keys() & {**made, **shorter}.keys()
    # The file of the one before is gone, but its tokens may not be those of the table any more.
    with pytest.raises(DataError, match="has changed since the worker started; restart it"):
        of(first)


def test_table_is_converted_again_for_another_separator(tmp_path: Path, bert: str) -> None:
    file = tmp_path / "notes.csv"
    file.write_text("text;x,y\nthe cat;the,dog\n")
    options = {"file": str(file), "tokenizer": bert, "head": "causal-lm", "in_memory": False}
    prepared, made = PreparedFolder(tmp_path / "state"), []
    # [CLS] the cat [SEP], and with the comma [CLS] the cat ; the [SEP].
    for separator, column, tokens in ((",", "text;x", 6), (";", "text", 4)):
        dataset = load("text", {**options, "separator": separator, "text": column}, prepared=prepared)
        assert dataset.inputs["input_ids"].shape == (1, tokens)
        made.append(files(tmp_path / "state").keys())
        assert len(made[-1]) == 2
    assert not made[0] & made[1]


@pytest.mark.parametrize("content", [b"", b"no", b"\0" * 5000, None], ids=["empty", "short", "zeros", "cut off"])
@pytest.mark.parametrize("kind", ["table", "tokens"])
def test_a_damaged_file_is_made_again(
    tmp_path: Path, table: Path, bert: str, kind: str, content: bytes | None
) -> None:
    prepared, options = (
        PreparedFolder(tmp_path / "state"),
        {"file": str(table), "tokenizer": bert, "in_memory": False},
    )
    expected = of(load("text", options, prepared=prepared))
    (file,) = (tmp_path / "state").glob(f"{kind}-*")
    whole = file.read_bytes()
    file.write_bytes(whole[: 2 * len(whole) // 3] if content is None else content)
    assert of(load("text", options, prepared=prepared)) == expected
    assert file.read_bytes() == whole


def test_another_than_the_worker_reads_what_is_there_and_writes_nothing(
    tmp_path: Path, table: Path, bert: str
) -> None:
    folder, options = tmp_path / "notes", {"file": str(table), "tokenizer": bert, "in_memory": False}
    expected = of(load("text", options, prepared=PreparedFolder(folder, writable=False)))
    assert not folder.exists()
    load("text", options, prepared=PreparedFolder(folder))
    made = files(folder)
    assert of(load("text", {**options}, prepared=PreparedFolder(folder, writable=False))) == expected
    load("text", {**options, "max_length": 3}, prepared=PreparedFolder(folder, writable=False))
    assert files(folder) == made


@pytest.mark.parametrize("kind", ["csv", "parquet", "saved"])
def test_every_table_is_mapped_from_arrow(tmp_path: Path, bert: str, kind: str) -> None:
    rows = datasets.Dataset.from_list([{"text": row["text"], "label": row["label"]} for row in ROWS])
    file = tmp_path / f"notes.{kind}"
    if kind == "saved":
        rows.save_to_disk(str(file))
    elif kind == "csv":
        file.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS))
    else:
        parquet.write_table(rows.data.table, file)
    prepared = PreparedFolder(tmp_path / "state")
    dataset = load("text", {"file": str(file), "tokenizer": bert, "in_memory": False}, prepared=prepared)
    names = [name.partition("-")[0] for name in files(tmp_path / "state")]
    assert names == (["tokens"] if kind == "saved" else ["table", "tokens"])
    assert [len(batch["labels"]) for batch in of(dataset)][:6] == [7] * 5 + [5]
    os.utime(next(file.glob("*.arrow")) if kind == "saved" else file, (1, 1))
    with pytest.raises(DataError, match="has changed since the worker started; restart it"):
        of(dataset)


def test_tokens_are_a_table_of_datasets_without_padding(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text\nthe cat\nthe cat sat\n")
    plain = plain_tokenizer(tmp_path / "plain", ("the", "cat", "sat"))
    options = {"file": str(tmp_path / "notes.csv"), "tokenizer": str(plain), "head": "causal-lm"}
    load("text", options, prepared=PreparedFolder(tmp_path / "state"))
    (file,) = (tmp_path / "state").glob("tokens-*")
    # Columns of usual values take no room.
    rows = {"input_ids": [[2, 3, 1], [2, 3, 4, 1]], "attention_mask": [None, None]}
    assert datasets.Dataset.from_file(str(file))[:] == rows
    truncation = {"texts": 2, "cut": 0, "longest": 4, "limit": 128, "lost": 0.0, "most": 1 << 20}
    notes = {"unknown": 0.0, "truncation": truncation, "columns": ["input_ids"], "longest": 4}
    assert written_rows(mapped(file)).notes == notes


def test_pairs_have_token_types_in_some_batches_alone(tmp_path: Path, bert: str) -> None:
    # The first 512 texts are a batch of their own, without a second text.
    rows = [f"{'fox' if number < 512 else 'dog'},{'' if number < 512 else 'the'},0\n" for number in range(600)]
    (tmp_path / "pairs.csv").write_text("text,other,label\n" + "".join(rows))
    options = {"file": str(tmp_path / "pairs.csv"), "tokenizer": bert, "second_text": "other"}
    dataset = load("text", {**options, "in_memory": False})
    # [CLS] fox [SEP] [SEP], and [CLS] dog [SEP] the [SEP].
    batch = dataset.read(torch.tensor([599, 0]))
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]
    assert dataset.report.unknown_tokens == 512 / (512 + 2 * 88)


FULL = """
import json, resource, signal, sys
from pathlib import Path
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
options, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (1000, 150_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        load("text", options, prepared=PreparedFolder(folder))
    except DataError as fault:
        print(fault, [path.name.partition("-")[0] for path in folder.iterdir()])
"""


def test_a_disk_without_room_leaves_nothing_half_written(tmp_path: Path, bert: str) -> None:
    # No file may be larger: as on a full disk, the write fails. The table takes 65 kB, its tokens 250 kB.
    file = tmp_path / "notes.csv"
    file.write_text("text,label\n" + f"{'ran ' * 30},1\n" * 500)
    options = {"file": str(file), "tokenizer": bert, "second_text": "text"}
    done = forked(FULL, json.dumps(options), str(tmp_path / "state"), module="tests.support.code")
    found = done.stdout.splitlines()
    assert len(found) == 2, done.stderr
    reason = f"cannot be converted: {os.strerror(errno.EFBIG)}: make room where state_dir is"
    for line, what, left in zip(found, (file, f"the texts of {file}"), ([], ["table"]), strict=True):
        assert line.startswith(f"file: {what} {reason}")
        assert line.endswith(str(left))


MEASURE = """
import json, os, sys, tracemalloc
from pathlib import Path
import torch
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.data.registry import load
from benchmarks.measuring import forget_peak, peak_bytes
small, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
load("text", small, held_out=0.5, key=b"k")
forget_peak(os.getpid())
before = peak_bytes(os.getpid())
dataset = load("text", options, held_out=0.2, key=b"k", prepared=PreparedFolder(Path(sys.argv[3])))
for batch in dataset.batches(32, torch.Generator()):
    pass
print(json.dumps([peak_bytes(os.getpid()) - before, dataset.examples]))
"""


def added(tmp_path: Path, tokenizer: str, count: int, head: dict[str, Any]) -> int:
    """The peak bytes of memory that loading `count` texts and a pass over them add."""
    few, many = tmp_path / "few.jsonl", tmp_path / f"{count}.jsonl"
    for file, rows in ((few, 64), (many, count)):
        lines = ({"text": f"{row} " + "the cat sat " * 60, "label": row % 2} for row in range(rows))
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    small, options = ({"file": str(file), "tokenizer": tokenizer, "in_memory": False, **head} for file in (few, many))
    command = [sys.executable, "-c", MEASURE, json.dumps(small), json.dumps(options), str(tmp_path / f"made-{count}")]
    found: list[int] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    assert 0.7 * count < found[1] < 0.9 * count
    return found[0]


@pytest.mark.long
@pytest.mark.parametrize("head", [{}, {"head": "causal-lm"}], ids=["classes", "language"])
def test_memory_does_not_grow_with_the_number_of_texts(tmp_path: Path, bert: str, head: dict[str, Any]) -> None:
    # Below 20,000 the buffers are not full: 2,000 add 48 MiB, 20,000 and 60,000 add 60.
    few, many = (added(tmp_path, bert, count, head) for count in (20_000, 60_000))
    # In memory, as before, the tokens alone of 40,000 texts more take 78 MiB and their texts 29 MiB.
    assert many - few < 30 << 20
