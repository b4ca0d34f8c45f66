"""Texts in a CSV, Parquet or JSON lines file, for classification, token classification or language modelling.

[datasets.reports]
kind = "text"
file = "/data/reports.csv"
tokenizer = "/models/bert"
labels = ["benign", "malignant"]
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tessera.shared.model.dataset_schema import IDS, DatasetSchema
from tessera.worker.data.cells import AT_ONCE
from tessera.worker.data.dataset import LABELS, Adapter, Dataset, RawTexts, Shape, TableOnDisk, schema_of
from tessera.worker.data.load_report import LoadReport, Truncation, by_suffix, empty_texts
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.readers.arrow_rows import ArrowRows, write_rows, written_rows
from tessera.worker.data.readers.class_labels import LISTED, Numbering, combinations
from tessera.worker.data.readers.table_files import TableOptions
from tessera.worker.data.readers.tables import DataTable, Files, digest_of, disk_full, read_table, table_name
from tessera.worker.data.readers.tokenizer import (
    MAX_TOKENS,
    RUN,
    WORDS,
    TokenCounts,
    identity_of,
    padding_of,
    pieces,
    tokenized_here,
    tokenizer_of,
)
from tessera.worker.data.readers.tokens import MASK, TokenBatch, TokenRows, token_batches
from tessera.worker.data.targets.numbers import numbers_of, unlabelled
from tessera.worker.data.targets.spans import words_and_tags
from tessera.worker.errors import DataError
from tessera.worker.model.forward import IGNORED

FORMAT = 3
"""The number of the way in which texts become tokens, which is part of their files' names."""
MAX_IN_MEMORY = 1 << 26
"""Bytes of the tokens' tensors up to which they are kept in memory if `in_memory` is unset."""


class TextOptions(TableOptions):
    file: Files = Field(
        description="a table: a file, a list of files, a pattern, a folder of shards, or one that `datasets` saved"
    )
    head: Literal["text-classification", "token-classification", "causal-lm"] = Field(
        default="text-classification", description="the model's task"
    )
    text: str = Field(default="text", description="column: the text, or its words, in a list or separated by spaces")
    second_text: str | None = Field(default=None, description="column: the second text of a pair, as in entailment")
    label: str = Field(default="label", description="column: the class, or the class of each word")
    spans: bool = Field(
        default=False,
        description="for token-classification: whether `label` has a list of spans {start, end, label} of characters",
    )
    tokenizer: str = Field(description='a local folder, a name on the hub, or "run": that of each run\'s model')
    max_length: PositiveInt = Field(default=128, le=MAX_TOKENS, description="tokens to which a text is truncated")
    pack: bool = Field(
        default=False, description="for causal-lm: whether rows of max_length tokens hold several texts each"
    )
    in_memory: bool | None = Field(
        default=None,
        description="whether tokens are kept in memory rather than read for each batch; up to 64 MiB if unset",
    )


def text(options: TextOptions, prepared: PreparedFolder = NOT_KEPT) -> Dataset:
    """Return `input_ids`, `attention_mask` and, if used, `token_type_ids`, int64 [n, tokens], and `labels`, int64.

    Labels are [n] for text classification, else [n, tokens] with -100 where they are ignored: at padding, and after
    the first token of a word. Several labels and targets are as `numbers_of` returns them. `tokens` is the length of
    the longest text, at most `max_length`; under privacy it is `max_length`. Tables and tokens are made once, in
    `prepared`.
    """
    if options.second_text is not None and options.head != "text-classification":
        raise DataError(f"second_text: needs head text-classification, not {options.head}: leave it out")
    if options.spans and (options.head != "token-classification" or not options.labels):
        raise DataError("spans: needs head token-classification, and `labels` such as O, B-drug and I-drug")
    if options.problem and options.head != "text-classification":
        raise DataError(f"problem_type: needs head text-classification, not {options.head}: leave it out")
    if options.pack and options.head != "causal-lm":
        raise DataError(f"pack: needs head causal-lm, not {options.head}: leave it out")
    table = read_table("file", options.file, options.split, prepared, options.separator)
    parts, labels = _HEADS[options.head](options, table)
    # This pass finds a row without text, and what no tokenizer can read, before any run.
    columns = (parts[name] for name in ("first", "second") if name in parts)
    empty = sum(empty_texts(_readable(table, column)) for column in columns)
    convert, numbers = partial(_converted, options, table, prepared), np.arange(table.examples)
    texts = RawTexts(**parts, convert=convert, max_length=options.max_length, numbers=numbers)
    tokens = (options.max_length,)
    of_each = tuple(labels.shape[1:]) if options.head == "text-classification" else tokens
    shapes = {IDS: tokens, MASK: tokens, LABELS: of_each}
    raw = Dataset(
        {LABELS: labels},
        domains=table.domains(options.domain),
        sources=_sources(options, table),
        groups=table.groups(options.group),
        subgroups=table.subgroups(options.subgroups),
        texts=texts,
        pack=options.pack,
        report=LoadReport(
            ignored_files=by_suffix(table.other_files),
            passed_over=table.passed_over,
            empty_texts=empty,
            ungrouped=table.ungrouped(options.group, options.text, options.second_text, options.label),
            without_group=table.without_group(options.group),
            truncation=over_in_words(texts, options.max_length) if options.tokenizer == RUN else None,
            combined=[]
            if options.problem
            else combinations(options.labels or table.class_names(options.label) or ()),
            unlabelled=unlabelled(labels),
        ),
        schema=_schema(options, labels, shapes),
    )
    prepared.clear(lambda name: name.startswith((table_name(table.digest), _tokens_name(options, table))))
    if options.tokenizer == RUN:
        return raw
    return tokenized_here(raw, tokenizer_of("tokenizer", options.tokenizer, by_word=texts.by_word))


def _schema(options: TextOptions, labels: Tensor, shapes: Mapping[str, Shape]) -> DatasetSchema:
    """Return the schema of texts, whose tokens are integers."""
    tensors = {**dict.fromkeys(shapes, torch.empty(0, dtype=torch.int64)), LABELS: labels}
    return schema_of(tensors, shapes, None, options.labels, options.problem)


def _readable(table: DataTable, column: Iterable[Any]) -> Iterator[Any]:
    """Yield the texts, or lists of words, of a table. Raises DataError, naming the row, for one that is no text."""
    for row, text in enumerate(column):
        try:
            "".join(text).encode()
        except UnicodeEncodeError as fault:
            raise DataError(
                f"text: row {row} of {table.where} has half of a surrogate pair, which is no character: correct or "
                "remove the row"
            ) from fault
        yield text


def over_in_words(texts: RawTexts, most: int) -> Truncation:
    """Return the number of texts with more words than the most tokens. A pair of chats is two of them."""
    counted = [sum(len(part.split()) for part in text) for text in texts.whole_texts()]
    return Truncation(len(counted), sum(words > most for words in counted), max(counted, default=0), most)


def _tokens_name(options: TextOptions, table: DataTable) -> str:
    """Return the beginning of the names of files with the texts of a table as tokens."""
    others = {"file", "split", "separator", "tokenizer", "in_memory", "pack", "domain", "group", "subgroups"}
    return f"tokens-{digest_of([FORMAT, table.digest, options.model_dump(mode='json', exclude=others)])}"


def _converted(
    options: TextOptions,
    table: DataTable,
    prepared: PreparedFolder,
    dataset: Dataset,
    texts: RawTexts,
    tokenizer: PreTrainedTokenizerBase,
) -> Dataset:
    """Return the data set that `text` describes from raw texts: all of a table, or some for a run's tokenizer."""
    counts = TokenCounts(tokenizer, texts)
    found = _checked(options, table, texts, pieces(tokenizer, texts, counts))
    file = TokenFile(table, prepared, _tokens_name(options, table), options.in_memory)
    tokens = file.tokens(texts, tokenizer, counts, found)
    return file.dataset(dataset, texts, tokenizer, tokens, {LABELS: IDS} if options.head == "causal-lm" else {})


@dataclass(frozen=True)
class TokenFile:
    """The file with the texts of a table as tokens, which is made once for each tokenizer."""

    table: DataTable
    prepared: PreparedFolder
    begin: str
    """The beginning of its name."""
    in_memory: bool | None
    """True to read all tokens at once; unset, up to `MAX_IN_MEMORY` bytes."""

    def tokens(
        self,
        texts: RawTexts,
        tokenizer: PreTrainedTokenizerBase,
        counts: TokenCounts,
        found: Iterable[TokenBatch],
        more: Mapping[str, Any] = {},
    ) -> ArrowRows:
        """Return the rows of the file, which `found` yields if there is none yet. `more` are further notes, which may
        be filled in while they are yielded. Raises DataError."""
        notes = dict[str, Any]()

        def batches() -> Iterator[pa.RecordBatch]:
            yield from token_batches(found, notes)
            notes.update(unknown=counts.unknown(), truncation=asdict(counts.truncation()), **more)

        rows = hashlib.sha256(np.asarray(texts.numbers).tobytes()).hexdigest()[:16]
        same = f"{self.begin}-{rows}-"
        name = f"{same}{digest_of(identity_of(tokenizer))}.arrow"
        try:
            tokens = self.prepared.file(name, lambda file: write_rows(file, batches(), notes), written_rows)
        except OSError as fault:
            raise disk_full("file", f"the texts of {self.table.where}", fault) from fault
        self.prepared.clear(lambda other: other == name or not other.startswith(same))
        return tokens

    def dataset(
        self,
        dataset: Dataset,
        texts: RawTexts,
        tokenizer: PreTrainedTokenizerBase,
        tokens: ArrowRows,
        more: Mapping[str, str] = {},
    ) -> Dataset:
        """Return the data set with these tokens. `more` names the column of each input that is not called like it."""
        noted = tokens.notes
        masks = {MASK} & set(tokenizer.model_input_names)
        columns = {name: name for name in [*masks, *noted["columns"]] if name != MASK or masks} | dict(more)
        padding = padding_of(tokenizer, texts, columns)
        if LABELS in columns:
            padding = replace(padding, values={**padding.values, LABELS: IGNORED})
        width, texts_of_each = noted["longest"], 2 if texts.of_pairs else 1
        on_disk = TableOnDisk(
            TokenRows(tokens, self.table.check, columns, padding.values, width, texts.of_pairs),
            torch.arange(len(tokens) // texts_of_each),
            dict.fromkeys(columns, ((2, width) if texts.of_pairs else (width,), torch.int64)),
        )
        tensors = {} if LABELS in columns else dataset.tensors
        report = replace(
            dataset.report,
            unknown_tokens=noted["unknown"],
            truncation=Truncation(**noted["truncation"]),
            no_end=texts.with_end and tokenizer.eos_token_id is tokenizer.sep_token_id is None,
        )
        made = replace(dataset, tensors=tensors, on_disk=on_disk, padding=padding, report=report)
        # Without token types: pairs of texts alone have them.
        declared = {name: tensor for name, tensor in made.inputs.items() if name != "token_type_ids"}
        shapes: dict[str, Shape] = {
            name: (*tensor.shape[1:-1], padding.width) if name in padding.values else tuple(tensor.shape[1:])
            for name, tensor in declared.items()
        }
        inputs = schema_of(declared, shapes).inputs
        made = replace(made, schema=dataset.schema.model_copy(update={"inputs": inputs}))
        small = len(tokens) * width * 8 * len(columns) <= MAX_IN_MEMORY
        return made.in_memory() if (small if self.in_memory is None else self.in_memory) else made


def _checked(
    options: TextOptions, table: DataTable, texts: RawTexts, found: Iterable[TokenBatch]
) -> Iterator[TokenBatch]:
    """Yield the texts as tokens, with the labels of words. Raises DataError, naming the row, for one of which nothing
    could be learnt."""
    least, done = 2 if options.head == "causal-lm" else 1, 0
    for piece in found:
        some = slice(done, done + len(piece.lengths))
        rows, done = texts.numbers[some], some.stop
        columns = dict(piece.columns)
        if texts.by_word:
            labels = columns[LABELS] = _of_first_tokens(texts.tags[some], columns.pop(WORDS), piece.lengths)
            # A batch in which all labels are ignored has a loss of nan.
            asked = np.bincount(_of_each_token(piece.lengths), labels != IGNORED, len(piece.lengths))
            if len(empty := np.flatnonzero(asked == 0)):
                row = f"row {rows[empty[0]]} of {table.where}"
                raise DataError(f"max_length: {row} has no word in its first {options.max_length} tokens")
        # A text without tokens gives a loss of nan, and so does a single token without a next one.
        if len(short := np.flatnonzero(piece.lengths < least)):
            row = f"row {rows[short[0]]} of {table.where}"
            raise DataError(f"text: {row} has fewer than {least} tokens: remove the row")
        yield TokenBatch(piece.lengths, columns)


def _of_each_token(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the text of each token of texts of these lengths, int64 [tokens of all texts]."""
    return np.repeat(np.arange(len(lengths)), lengths)


def _of_first_tokens(
    tags: Sequence[Sequence[int]], words: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the labels of words at the first token of each, and -100 elsewhere, int64 [tokens of all texts].

    `words`, of the same shape, is the place of each token's word in its text, or -1.
    """
    texts = _of_each_token(lengths)
    before = np.stack([texts[:-1], words[:-1]]) != np.stack([texts[1:], words[1:]])
    begins = (words >= 0) & np.concatenate([[True], before.any(axis=0)])[: len(words)]
    labels = np.full(len(words), IGNORED, np.int64)
    labels[begins] = [tags[text][word] for text, word in zip(texts[begins], words[begins], strict=True)]
    return labels


def _sources(options: TextOptions, table: DataTable) -> NDArray[np.uint8]:
    """Return a digest of each row's texts in the file, which does not depend on the tokenizer or on padding, uint8
    [rows, 32]."""
    names = [name for name in (options.text, options.second_text) if name is not None]
    rows = zip(*(table.cells("text", name) for name in names), strict=True)
    digests = np.empty((table.examples, hashlib.sha256().digest_size), np.uint8)
    for place, row in enumerate(rows):
        digests[place] = memoryview(hashlib.sha256(json.dumps(row, default=str).encode()).digest())
    return digests


Parts = dict[str, Any]
"""The texts of a table, as arguments of `RawTexts`."""


def _classified(options: TextOptions, table: DataTable) -> tuple[Parts, Tensor]:
    texts = {"first": table.texts("text", options.text)}
    if options.second_text is not None:
        texts["second"] = table.texts("second_text", options.second_text)
    if options.problem:
        return texts, numbers_of(table, options, options.label)
    cells = table.cells("label", options.label)
    numbering = _numbering(options, table)
    labels = torch.empty(table.examples, dtype=torch.int64)
    for first in range(0, len(cells), AT_ONCE):
        some = cells[first : first + AT_ONCE]
        labels[first : first + AT_ONCE] = torch.tensor(numbering.numbers(some, range(first, first + len(some))))
    numbering.check()
    return texts, labels


def _tagged(options: TextOptions, table: DataTable) -> tuple[Parts, Tensor]:
    """Return lists of words with the label of each, and no labels before there are tokens: int64 [n, 0]."""
    if options.spans:
        words, tags = words_and_tags(table, options.text, options.label)
    else:
        words = table.cells("text", options.text).mapped(_words)
        tags = table.cells("label", options.label).mapped(_words)
    numbering = _numbering(options, table)
    for row, (of_words, of_tags) in enumerate(zip(words, tags, strict=True)):
        if not of_words or len(of_words) != len(of_tags):
            raise DataError(f"label: row {row} of {table.where} has {len(of_tags)} labels for {len(of_words)} words")
        if any(not isinstance(word, str | int | float) for word in of_words):
            raise DataError(f"text: row {row} of {table.where} has a word that is not text: fill it in, or remove it")
        numbering.numbers(of_tags, repeat(row))
    numbering.check()
    first = words.mapped(lambda of_text: list(map(str, of_text)))
    labels = torch.empty((len(first), 0), dtype=torch.int64)
    return {"first": first, "tags": tags.mapped(numbering.numbers), "by_word": True}, labels


def _numbering(options: TextOptions, table: DataTable) -> Numbering:
    names = options.labels or table.class_names(options.label)
    return Numbering("label", table.where, names, options.absent)


def _words(value: object) -> list[Any]:
    """Return a cell's list of words or tags; in a CSV file they are separated by spaces. Raises DataError for a list
    that was written as text."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and LISTED.fullmatch(value):
        raise DataError(
            f"text: a list was written as text, {value[:40]!r}: write words and labels with spaces between them, or "
            "save the table as JSON lines or Parquet, which have lists"
        )
    return value.split() if isinstance(value, str) else []


def _continued(options: TextOptions, table: DataTable) -> tuple[Parts, Tensor]:
    """Return texts, and no labels before there are tokens: int64 [n, 0]."""
    texts = table.texts("text", options.text)
    return {"first": texts, "with_end": True}, torch.empty((len(texts), 0), dtype=torch.int64)


_HEADS = {"text-classification": _classified, "token-classification": _tagged, "causal-lm": _continued}

ADAPTER = Adapter("text", TextOptions, text, text)
