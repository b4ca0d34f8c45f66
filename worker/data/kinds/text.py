"""Texts in a CSV, Parquet or JSON lines file, for classification, token classification or language modelling.

[datasets.reports]
kind = "text"
file = "/data/reports.csv"
tokenizer = "/models/bert"
labels = ["benign", "malignant"]
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from tessera.worker.data.dataset import LABELS, Adapter, DataError, Dataset, LoadReport, Options, RawTexts, schema_of
from tessera.worker.data.readers.class_labels import Absent, Names, numbered
from tessera.worker.data.readers.tables import DataTable, Files, read_table
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, RUN, Encoded, encode, tokenized, tokenizer_of
from tessera.worker.model.forward import IGNORED


class TextOptions(Options):
    file: Files = Field(
        description="a table: a file, a list of files, a pattern, a folder of shards, or one that `datasets` saved"
    )
    split: str | None = Field(default=None, description="the split, if `file` is a folder with several")
    head: Literal["text-classification", "token-classification", "causal-lm"] = Field(
        default="text-classification", description="the model's task"
    )
    text: str = Field(default="text", description="column: the text, or its words, in a list or separated by spaces")
    second_text: str | None = Field(default=None, description="column: the second text of a pair, as in entailment")
    label: str = Field(default="label", description="column: the class, or the class of each word")
    labels: Names | None = Field(
        default=None, description="the classes' names in order; unset, the table's own, or labels are numbers"
    )
    absent: Absent | None = Field(
        default=None, description="the names in `labels` of which this site has no example, or `any`"
    )
    domain: str | None = Field(default=None, description="column: the example's origin")
    group: str | None = Field(default=None, description="column: equal values are held out together (the patient)")
    tokenizer: str = Field(description='a local folder, a name on the hub, or "run": that of each run\'s model')
    max_length: PositiveInt = Field(default=128, le=MAX_TOKENS, description="tokens to which a text is truncated")


def text(options: TextOptions) -> Dataset:
    """Return `input_ids`, `attention_mask` and, if used, `token_type_ids`, int64 [n, tokens], and `labels`, int64.

    Labels are [n] for text classification, else [n, tokens] with -100 where they are ignored: at padding, and after
    the first token of a word. `tokens` is the length of the longest text, at most `max_length`; under privacy it is
    `max_length`.
    """
    if options.second_text is not None and options.head != "text-classification":
        raise DataError(f"second_text: needs head text-classification, not {options.head}: leave it out")
    table = read_table("file", options.file, options.split)
    texts, labels = _HEADS[options.head](options, table)
    tokens = (options.max_length,)
    shapes = {"input_ids": tokens, "attention_mask": tokens, LABELS: tokens if labels.ndim > 1 else ()}
    raw = Dataset(
        {LABELS: labels},
        domains=table.domains(options.domain),
        sources=_sources(options, table),
        groups=table.groups(options.group),
        texts=texts,
        report=LoadReport(None, table.ignored_files),
        schema=schema_of(dict.fromkeys(shapes, labels), shapes, len(options.labels or ()) or None),
    )
    if options.tokenizer == RUN:
        return raw
    return tokenized(raw, tokenizer_of("tokenizer", options.tokenizer, by_word=texts.by_word))


def _converted(where: str, dataset: Dataset, texts: RawTexts, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the data set that `text` describes from raw texts and the label of each, or of each of its words."""
    encoded = encode(tokenizer, texts)
    labels, padding, least = dataset.tensors[LABELS], encoded.padding, 1
    if texts.by_word:
        labels = _of_first_tokens(labels, encoded)
        # A batch in which all labels are ignored has a loss of nan.
        if len(empty := torch.nonzero((labels == IGNORED).all(dim=1))):
            row = f"row {texts.numbers[int(empty[0])]} of {where}"
            raise DataError(f"max_length: {row} has no word in its first {texts.max_length} tokens")
    elif labels.ndim > 1:
        labels, least = encoded.ids.masked_fill(encoded.empty, IGNORED), 2
    # A text without tokens gives a loss of nan, and so does a single token without a next one.
    if len(short := torch.nonzero((~encoded.empty).sum(dim=1) < least)):
        row = f"row {texts.numbers[int(short[0])]} of {where}"
        raise DataError(f"text: {row} has fewer than {least} tokens: remove the row")
    if labels.ndim > 1:
        padding = replace(padding, values={**padding.values, LABELS: IGNORED})
    tensors = {**encoded.inputs, LABELS: labels}
    # Without token types, which are left out or not by what the texts are.
    declared = {name: tensor for name, tensor in tensors.items() if name != "token_type_ids"}
    shapes = {name: (padding.width,) if tensor.ndim > 1 else () for name, tensor in declared.items()}
    report = replace(dataset.report, unknown_tokens=encoded.unknown)
    schema = schema_of(declared, shapes, dataset.schema.classes)
    return replace(dataset, tensors=tensors, padding=padding, report=report, schema=schema)


def _sources(options: TextOptions, table: DataTable) -> list[bytes]:
    """Return a digest of each row's texts in the file, which does not depend on the tokenizer or on padding."""
    names = [name for name in (options.text, options.second_text) if name is not None]
    rows = zip(*(table.column("text", name) for name in names), strict=True)
    return [hashlib.sha256(json.dumps(row, default=str).encode()).digest() for row in rows]


def _raw(options: TextOptions, table: DataTable, first: Sequence[Any], **more: Any) -> RawTexts:
    convert = partial(_converted, table.where)
    return RawTexts(first, convert, options.max_length, numbers=range(len(first)), **more)


def _classified(options: TextOptions, table: DataTable) -> tuple[RawTexts, Tensor]:
    seconds = None if options.second_text is None else table.texts("second_text", options.second_text)
    labels = torch.tensor(_numbered(options, table, table.column("label", options.label)))
    return _raw(options, table, table.texts("text", options.text), second=seconds), labels


def _tagged(options: TextOptions, table: DataTable) -> tuple[RawTexts, Tensor]:
    """Return lists of words, and the label of each word, int64 [n, words], with -100 after a list's end."""
    words = [_words(value) for value in table.column("text", options.text)]
    tags = [_words(value) for value in table.column("label", options.label)]
    for row, (of_words, of_tags) in enumerate(zip(words, tags, strict=True)):
        if not of_words or len(of_words) != len(of_tags):
            raise DataError(f"label: row {row} of {table.where} has {len(of_tags)} labels for {len(of_words)} words")
    numbers = iter(_numbered(options, table, [tag for row in tags for tag in row]))
    # Further words have no token within `max_length`.
    by_word = [torch.tensor([next(numbers) for _ in row][: options.max_length]) for row in tags]
    first = [row[: options.max_length] for row in words]
    return _raw(options, table, first, by_word=True), pad_sequence(by_word, True, IGNORED)


def _of_first_tokens(by_word: Tensor, encoded: Encoded) -> Tensor:
    """Return the labels of words, [n, words], at the first token of each, [n, tokens], and -100 elsewhere."""
    labels = torch.full_like(encoded.ids, IGNORED)
    for row, words in enumerate(encoded.words):
        before = None
        for place, word in enumerate(words):
            if word is not None and word != before:
                labels[row, place] = by_word[row, word]
            before = word
    return labels


def _numbered(options: TextOptions, table: DataTable, values: Sequence[object]) -> list[int]:
    names = options.labels or table.columns.classes.get(options.label)
    return numbered("label", table.where, values, names, options.absent)


def _words(value: object) -> list[str]:
    """Return a cell's list of words or tags; in a CSV file they are separated by spaces."""
    if isinstance(value, list):
        return [str(word) for word in value]
    return value.split() if isinstance(value, str) else []


def _continued(options: TextOptions, table: DataTable) -> tuple[RawTexts, Tensor]:
    """Return texts, and no labels before there are tokens: int64 [n, 0]."""
    texts = table.texts("text", options.text)
    return _raw(options, table, texts), torch.empty((len(texts), 0), dtype=torch.int64)


_HEADS = {"text-classification": _classified, "token-classification": _tagged, "causal-lm": _continued}

ADAPTER = Adapter("text", TextOptions, text)
