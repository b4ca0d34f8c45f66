"""Packed rows of documents: what a model makes of each document alone, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tessera.shared.methods.base import Plan
from tessera.worker.data.dataset import Dataset, Padding
from tessera.worker.data.packing import packed
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.executor import mapped
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.packing_probe import packing_fault
from tests.support.pretrained import plain_tokenizer

WORDS = ("the", "cat", "dog", "sat", "ran")
LLAMA = {
    "model_type": "llama", "vocab_size": 7, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 7, "n_positions": 16}
MAMBA = {"model_type": "mamba", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}
BERT = {
    "model_type": "bert", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "is_decoder": True,
}  # fmt: skip


def documents(folder: Path, *texts: str, side: str = "right", **options: Any) -> Dataset:
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain = plain_tokenizer(folder / side, WORDS, padding_side=side)
    given = {"file": str(folder / "notes.jsonl"), "tokenizer": str(plain), "head": "causal-lm", "max_length": 8}
    return load("text", {**given, "pack": True, **options})


TEXTS = ("the cat sat", "dog ran", "the dog", "cat cat sat the", "ran the dog sat the cat ran dog the end", "sat ran")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_rows_hold_whole_documents_in_their_order(tmp_path: Path, side: str, *, in_memory: bool) -> None:
    rows = packed(documents(tmp_path, *TEXTS, side=side, in_memory=in_memory))
    assert bool(rows.on_disk) is not in_memory
    (batch,) = rows.batches(None)
    assert batch.keys() == {"input_ids", "position_ids", "labels"}  # no mask: it would let documents see each other
    the, cat, dog, sat, ran = range(2, 7)
    assert batch["input_ids"].tolist() == [
        [the, cat, sat, 1, dog, ran, 1, 1],
        [the, dog, 1, cat, cat, sat, the, 1],
        [ran, the, dog, sat, the, cat, ran, dog],  # cut at max_length
        [sat, ran, 1, 1, 1, 1, 1, 1],
    ]
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0],
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 0, 1, 2, 3, 4],
    ]
    # The end of a document predicts no beginning of another.
    no = -100
    assert batch["labels"].tolist() == [
        [no, cat, sat, 1, no, ran, 1, no],
        [no, dog, 1, no, cat, sat, the, 1],
        [no, the, dog, sat, the, cat, ran, dog],
        [no, ran, 1, no, no, no, no, no],
    ]
    # Any rows, in any order.
    assert torch.equal(rows.read(torch.tensor([3, 0]))["labels"], batch["labels"][[3, 0]])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_and_loss_are_those_of_each_document_alone(tmp_path: Path, attention: str) -> None:
    dataset = documents(tmp_path, *TEXTS)
    model = instantiate(LLAMA, "causal-lm", seed=0)
    model.set_attn_implementation(attention)
    model.train(mode=False)
    (batch,) = packed(dataset).batches(None)
    found = forward(model, "causal-lm", batch)
    places = [(0, 0, 4), (0, 4, 7), (1, 0, 3), (1, 3, 8), (2, 0, 8), (3, 0, 3)]
    losses = []
    assert found.logits is not None
    for document, (row, first, last) in enumerate(places):
        ids = dataset.tensors["input_ids"][document][None, : last - first]
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        assert torch.equal(ids[0], batch["input_ids"][row, first:last])
        together = found.logits[row, first:last]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
        losses.append(cross_entropy(alone[:-1], ids[0, 1:], reduction="none"))
    torch.testing.assert_close(found.loss, torch.cat(losses).mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("masked", [True, False])
def test_no_token_is_lost_whose_label_is_ignored(*, masked: bool) -> None:
    no = -100
    # The padding's token, 1, is also the last one of the second text.
    texts = [([5, 6, 2, 3, 4], [no, no, no, 3, 4]), ([6, 5, 1], [no, 5, 1]), ([2, 2], [no, no]), ([3], [no])]

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (8 - len(row)) for row in rows])

    tensors = {"input_ids": padded([ids for ids, _ in texts], 1), "labels": padded([each for _, each in texts], no)}
    if masked:
        tensors["attention_mask"] = padded([[1] * len(ids) for ids, _ in texts], 0)
    values = {"input_ids": 1, "labels": no, "attention_mask": 0}
    (batch,) = packed(Dataset(tensors, padding=Padding(8, values))).batches(None)
    assert batch["input_ids"].tolist() == [[5, 6, 2, 3, 4, 6, 5, 1], [2, 2, 3, 1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[no, no, no, 3, 4, no, 5, 1], [no] * 8]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 1, 2, 3, 4]]


def test_no_document_sees_another(tmp_path: Path) -> None:
    model = instantiate(LLAMA, "causal-lm", seed=0)
    model.train(mode=False)
    rows = []
    for first in ("the cat sat", "dog dog dog"):
        (batch,) = packed(documents(tmp_path, first, "dog ran", "the dog")).batches(None)
        logits = forward(model, "causal-lm", batch).logits
        assert logits is not None
        rows.append(logits[0, 4:])
    assert torch.equal(*rows)


def test_held_out_documents_are_packed_apart(tmp_path: Path) -> None:
    whole = documents(tmp_path, *TEXTS * 5)
    options = {"file": str(tmp_path / "notes.jsonl"), "tokenizer": str(tmp_path / "right"), "head": "causal-lm"}
    dataset = load("text", {**options, "max_length": 8, "pack": True}, held_out=0.5, key=b"k")
    rows = packed(dataset)
    assert rows.held_out
    counts = [int((part.tensors["position_ids"] == 0).sum()) for part in (rows, rows.held_out)]
    paddings = [int((part.tensors["input_ids"][:, -1] == 1).sum()) for part in (rows, rows.held_out)]
    assert sum(counts) - sum(paddings) == whole.examples


def test_another_process_reads_packed_rows_from_the_files(tmp_path: Path) -> None:
    """Also of texts whose other columns no process can be given."""
    (tmp_path / "notes.jsonl").write_text(
        "".join(json.dumps({"text": text, "patient": number}) + "\n" for number, text in enumerate(TEXTS))
    )
    plain = plain_tokenizer(tmp_path / "plain", WORDS)
    options = {"file": str(tmp_path / "notes.jsonl"), "tokenizer": str(plain), "head": "causal-lm", "max_length": 8}
    given = {**options, "pack": True, "in_memory": False, "group": "patient"}
    rows = packed(load("text", given, prepared=PreparedFolder(tmp_path / "state")))
    mapped.write(tmp_path / "rows", mapped.plain(rows))
    there, index = mapped.read(tmp_path / "rows"), torch.tensor([2, 0])
    assert there.on_disk.kinds.keys() == {"input_ids", "position_ids", "labels"}
    assert all(torch.equal(there.read(index)[name], tensor) for name, tensor in rows.read(index).items())


def test_rows_of_other_heads_are_not_packed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pack: needs head causal-lm, not text-classification: leave it out"):
        documents(tmp_path, "the", head="text-classification")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_probe_passes_a_model_that_keeps_documents_apart(config: dict[str, Any], attention: str) -> None:
    model = instantiate(config, "causal-lm", seed=0)
    model.set_attn_implementation(attention)
    assert packing_fault(LocalTaskContext(model, "causal-lm", Plan(), ())) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [(MAMBA, "lets a document see the others of its row"), (BERT, "lets a document see the others of its row")],
    ids=["mamba", "bert"],
)
def test_probe_refuses_a_model_that_does_not(config: dict[str, Any], said: str) -> None:
    model = instantiate(config, "causal-lm", seed=0)
    assert packing_fault(LocalTaskContext(model, "causal-lm", Plan(), ())) == said
