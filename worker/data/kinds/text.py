"""Texts in a CSV, Parquet or JSON lines file: to classify, to tag word by word, or to go on from.

[datasets.reports]
kind = "text"
file = "/data/reports.csv"
tokenizer = "/models/bert"
labels = ["benign", "malignant"]
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tessera.worker.data.dataset import LABELS, Adapter, DataError, Dataset, Options
from tessera.worker.data.readers.class_labels import Names, numbered
from tessera.worker.data.readers.tables import DataTable, Files, read_table
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, Encoded, encode, tokenizer_of
from tessera.worker.model.forward import IGNORED


class TextOptions(Options):
    file: Files
    head: Literal["text-classification", "token-classification", "causal-lm"] = Field(
        default="text-classification", description="what the model is for"
    )
    text: str = Field(default="text", description="column: the text, or its words, in a list or with spaces between")
    second_text: str | None = Field(default=None, description="column: a text that goes with it, as in entailment")
    label: str = Field(default="label", description="column: the class, or each word's")
    labels: Names | None = Field(default=None, description="the classes' names in order; without, labels are numbers")
    domain: str | None = Field(default=None, description="column: where the example comes from")
    group: str | None = Field(default=None, description="column: what is held out together, such as the patient")
    tokenizer: str = Field(description="a local folder, or a name on the hub")
    max_length: PositiveInt = Field(default=128, le=MAX_TOKENS, description="tokens after which a text is cut off")


def text(options: TextOptions) -> Dataset:
    """`input_ids` and `attention_mask`, int64 [n, tokens], perhaps `token_type_ids`, and `labels`, int64.

    [n] to classify texts, else [n, tokens] with -100 where nothing is asked: behind the first piece of a word, and at
    what is only padding. `tokens` is what the longest text has, `max_length` at most; under privacy `max_length`.
    """
    if options.second_text is not None and options.head != "text-classification":
        raise DataError(f"second_text: goes with text-classification, not with {options.head}")
    table = read_table("file", options.file)
    # Words given one by one begin as words in a sentence do.
    more = {"add_prefix_space": True} if options.head == "token-classification" else {}
    tokenizer = tokenizer_of("tokenizer", options.tokenizer, **more)
    encoded, labels = _HEADS[options.head](options, table, tokenizer)
    # A model that attends to nothing answers with what is no number, and one token has no next one.
    least = 2 if options.head == "causal-lm" else 1
    short = torch.nonzero((~encoded.empty).sum(dim=1) < least)
    if len(short):
        raise DataError(f"text: row {int(short[0])} of {table.where} is too short: it has less than {least} tokens")
    domains = None if options.domain is None else table.domains("domain", options.domain)
    padding = encoded.padding
    if labels.ndim > 1:
        padding = replace(padding, values={**padding.values, LABELS: IGNORED})
    groups = None if options.group is None else table.groups("group", options.group)
    sources = _sources(options, table)
    return Dataset(
        {**encoded.inputs, LABELS: labels}, domains=domains, sources=sources, padding=padding, groups=groups
    )


def _sources(options: TextOptions, table: DataTable) -> list[bytes]:
    """Return a digest of each row's texts as they are in the file, without padding or tokenizer."""
    names = [name for name in (options.text, options.second_text) if name is not None]
    rows = zip(*(table.column("text", name) for name in names), strict=True)
    return [hashlib.sha256(json.dumps(row, default=str).encode()).digest() for row in rows]


def _classified(options: TextOptions, table: DataTable, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoded, Tensor]:
    texts = table.texts("text", options.text)
    seconds = None if options.second_text is None else table.texts("second_text", options.second_text)
    labels = numbered("label", table.where, table.column("label", options.label), options.labels)
    return encode(tokenizer, texts, seconds, max_length=options.max_length), torch.tensor(labels)


def _tagged(options: TextOptions, table: DataTable, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoded, Tensor]:
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer: {options.tokenizer} does not tell which word a token is of: it has no fast form")
    words = [_words(value) for value in table.column("text", options.text)]
    tags = [_words(value) for value in table.column("label", options.label)]
    for row, (of_words, of_tags) in enumerate(zip(words, tags, strict=True)):
        if not of_words or len(of_words) != len(of_tags):
            raise DataError(f"label: row {row} of {table.where} has {len(of_tags)} labels for {len(of_words)} words")
    numbers = iter(numbered("label", table.where, [tag for row in tags for tag in row], options.labels))
    by_word = [[next(numbers) for _ in row] for row in tags]
    encoded = encode(tokenizer, words, max_length=options.max_length, by_word=True)
    labels = torch.full_like(encoded.ids, IGNORED)
    for row, of_row in enumerate(by_word):
        before = None
        for place, word in enumerate(encoded.words[row]):
            if word is not None and word != before:
                labels[row, place] = of_row[word]
            before = word
    # A batch in which nothing is asked has a loss that is no number.
    empty = torch.nonzero((labels == IGNORED).all(dim=1))
    if len(empty):
        raise DataError(
            f"max_length: row {int(empty[0])} of {table.where} has no word left within {options.max_length} tokens"
        )
    return encoded, labels


def _words(value: object) -> list[str]:
    """Return a list of words, or of tags, which a CSV file can only hold as text."""
    if isinstance(value, list):
        return [str(word) for word in value]
    return value.split() if isinstance(value, str) else []


def _continued(options: TextOptions, table: DataTable, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoded, Tensor]:
    encoded = encode(tokenizer, table.texts("text", options.text), max_length=options.max_length)
    return encoded, encoded.ids.masked_fill(encoded.empty, IGNORED)


_HEADS = {"text-classification": _classified, "token-classification": _tagged, "causal-lm": _continued}

ADAPTER = Adapter("text", TextOptions, text)
