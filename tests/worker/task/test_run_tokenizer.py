"""Data sets whose texts are converted with the tokenizer of each run's model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera.shared.model.preprocessing import FileRef
from tessera.shared.problems import DigestMismatch
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.data.dataset import DataError, Dataset
from tessera.worker.data.partition.division import hold_out
from tessera.worker.data.registry import load
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.state.blob_cache import BlobTooLarge, Cache
from tessera.worker.task.errors import TaskFailure
from tessera.worker.task.tokenize import tokenize
from tests.support.pretrained import bert_tokenizer

WORDS = ("the", "cat", "sat", "dog")
FILES = ("tokenizer.json", "tokenizer_config.json")
SECRET = "the secretword"


def texts(folder: Path, *rows: str, **options: object) -> Dataset:
    lines = [f"{text},{number % 2}" for number, text in enumerate(rows)]
    (folder / "notes.csv").write_text("\n".join(["text,label", *lines]))
    return load("text", {"file": str(folder / "notes.csv"), "tokenizer": "run", **options})


def files(folder: Path, words: tuple[str, ...] = WORDS) -> dict[str, bytes]:
    made = bert_tokenizer(folder / "bert", words)
    settings = json.loads((made / FILES[1]).read_text())
    kept = {key: value for key, value in settings.items() if key.endswith("_token") or key == "model_input_names"}
    (made / FILES[1]).write_text(json.dumps(kept))
    return {name: (made / name).read_bytes() for name in FILES}


def tokens(
    folder: Path, dataset: Dataset, held: Mapping[str, bytes], *, embeddings: int = 8, sandbox: Sandbox | None = None,
    refs: Mapping[str, FileRef] | None = None, sent: bytes | None = None,
) -> Dataset:  # fmt: skip
    """The data set as a task of a run with these files sees it."""
    named = {name: FileRef(digest=digest_of(raw), nbytes=len(raw)) for name, raw in held.items()}
    stored = {digest_of(raw): raw for raw in held.values()}

    def copy_blob(digest: str, file: Any, progress: Any = None) -> None:
        progress(file.write(stored[digest] if sent is None else sent))

    coordinator = SimpleNamespace(copy_blob=copy_blob)
    shelf = Cache(folder / "cache", 1 << 30)
    env = SimpleNamespace(tokenized={}, scratch=folder, sandbox=sandbox, shelf=shelf, coordinator=coordinator)
    task = SimpleNamespace(dataset="notes", model="sha256:" + "0" * 64)
    run: Any = SimpleNamespace(env=env, task=task, check=lambda: None, report=SimpleNamespace(download_bytes=0))
    rows = SimpleNamespace(num_embeddings=embeddings)
    loaded: Any = SimpleNamespace(built=SimpleNamespace(model=SimpleNamespace(get_input_embeddings=lambda: rows)))
    document: Any = SimpleNamespace(preprocessing=refs or named)
    made = tokenize(run, document, loaded, dataset)
    # Later tasks of the run convert nothing.
    assert tokenize(run, document, loaded, dataset) is made
    return made


def test_texts_become_the_tensors_that_the_same_tokenizer_of_a_site_makes(tmp_path: Path) -> None:
    rows = ("the cat", "the dog sat", "sat", "cat cat cat dog")
    made = tokens(tmp_path, texts(tmp_path, *rows), files(tmp_path))
    own = load("text", {"file": str(tmp_path / "notes.csv"), "tokenizer": str(tmp_path / "bert")})
    assert made.tensors.keys() == own.tensors.keys()
    assert all(torch.equal(made.tensors[name], own.tensors[name]) for name in own.tensors)
    assert made.schema == own.schema
    assert list(made.identities()) == list(own.identities())
    assert torch.equal(made.padded().tensors["input_ids"], own.padded().tensors["input_ids"])


def test_pairs_and_what_is_held_out_are_converted_too(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(
        "text,other,label\n" + "".join(f"{'cat ' * n}dog,the sat,0\n" for n in range(20))
    )
    options = {"file": str(tmp_path / "pairs.csv"), "second_text": "other"}
    held = files(tmp_path)
    made = tokens(tmp_path, hold_out(load("text", {**options, "tokenizer": "run"}), 0.5, b"key"), held)
    own = hold_out(load("text", {**options, "tokenizer": str(tmp_path / "bert")}), 0.5, b"key")
    for mine, theirs in ((made, own), (made.held_out, own.held_out)):
        assert mine
        assert theirs
        assert mine.texts is None
        assert torch.equal(mine.tensors["labels"], theirs.tensors["labels"])
        # Each side is as wide as its own longest text.
        assert torch.equal(mine.padded().tensors["input_ids"], theirs.padded().tensors["input_ids"])


@pytest.mark.parametrize("head", ["token-classification", "causal-lm"])
def test_other_heads_name_a_tokenizer_of_the_site(tmp_path: Path, head: str) -> None:
    with pytest.raises(DataError, match=f"needs head text-classification, not {head}: name a folder"):
        texts(tmp_path, "the cat", "dog", head=head)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"held": {}}, "no-tokenizer", "'notes' takes the run's tokenizer, and the run's model has none"),
        ({"embeddings": 7}, "invalid-tokenizer", "has token 7; its model has embeddings for 0 to 6"),
        ({"held": {"tokenizer.json": b"{}"}}, "invalid-tokenizer", "the run's tokenizer cannot be loaded"),
        ({"held": {"tokenizer.json": b"no"}}, "invalid-tokenizer", "not JSON"),
        ({"words": ()}, "invalid-tokenizer", "the run's tokenizer has no vocabulary"),
        ({"rows": (SECRET, "unheard")}, "tokenizer-mismatch", "cannot convert the texts of this site"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_without_a_word_of_the_texts(
    tmp_path: Path, change: dict[str, Any], code: str, said: str
) -> None:
    held = change.get("held", files(tmp_path, change.get("words", ("cat",) if "rows" in change else WORDS)))
    dataset = texts(tmp_path, *change.get("rows", (SECRET, "the cat")))
    if "rows" in change:
        dataset = replace(dataset, texts=replace(dataset.texts, first=["secretword", "unheard"]))  # type: ignore[type-var]
    with pytest.raises(TaskFailure, match=said) as refused:
        tokens(tmp_path, dataset, held, embeddings=change.get("embeddings", 8))
    assert refused.value.code == code
    assert "secretword" not in str(refused.value)
    assert str(tmp_path) not in str(refused.value)


def test_bytes_that_are_others_or_too_many_are_refused(tmp_path: Path) -> None:
    held, dataset = files(tmp_path), texts(tmp_path, "the cat", "dog")
    with pytest.raises(DigestMismatch):
        tokens(tmp_path, dataset, held, sent=b"{}")
    refs = {"tokenizer.json": FileRef(digest=digest_of(held["tokenizer.json"]), nbytes=10)}
    with pytest.raises(BlobTooLarge, match="more than the 10 bytes"):
        tokens(tmp_path, dataset, held, refs=refs)
