"""Conversion of texts to a model's `input_ids`, by a tokenizer of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tessera.shared.model.dataset_schema import IDS
from tessera.shared.model.preprocessing import vocabulary_in
from tessera.worker.data.dataset import DataError, Dataset, Padding, RawTexts, in_short
from tessera.worker.data.readers.pretrained import load_pretrained
from tessera.worker.data.readers.token_file import DEFAULTS, MASK, Piece

MAX_TOKENS = 1 << 20
RUN = "run"
"""The setting of a data set that is converted with the tokenizer of each run."""
WORDS = "words"
AT_ONCE = 512
"""Number of texts to encode together: a tokenizer's result needs many times the memory of the tensors."""


def load_tokenizer(option: str, source: str, **more: object) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local folder, or of a name on the hub.

    Raises DataError, also if it knows no words, like the one that transformers makes of a folder without vocabulary.
    """
    if source == RUN:
        raise DataError(
            f"{option}: {RUN!r} is the tokenizer of each run, which only a data set's `tokenizer` may name: name a "
            f"folder; ./{RUN} is one of this name"
        )
    tokenizer: PreTrainedTokenizerBase = load_pretrained(option, source, AutoTokenizer.from_pretrained, **more)
    if not set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens):
        files = " or ".join(sorted(set(tokenizer.vocab_files_names.values()))) or "a tokenizer's files"
        raise DataError(
            f"{option}: {source} has no vocabulary, only {len(tokenizer)} special tokens: every word would "
            f"be unknown. Save the model's tokenizer there too ({files}), or name the folder that has it"
        )
    return tokenizer


def tokenizer_of(option: str, source: str, *, by_word: bool = False) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a padding token: its end-of-text token if it has no other. Raises DataError."""
    # A word of a list is encoded like a word within a sentence.
    tokenizer = load_tokenizer(option, source, **({"add_prefix_space": True} if by_word else {}))
    if by_word and not tokenizer.is_fast:
        raise DataError(f"{option}: {source} has no fast version, which token-classification needs")
    # Of `tokenizer.json` alone, transformers makes a tokenizer that ignores the setting.
    if by_word and isinstance(step := tokenizer.backend_tokenizer.pre_tokenizer, ByteLevel):
        step.add_prefix_space = True
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError(f"{option}: {source} has no padding token: set its pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens, all of one length. `tensors` are the tokenizer's results, int64 [texts, tokens] each."""

    tokenizer: PreTrainedTokenizerBase
    tensors: dict[str, Tensor]
    padding: Padding
    """The padding to the maximal length of texts."""
    unknown: float | None
    """The share of unknown tokens among those that stand for text, or None if the tokenizer knows every text."""

    @property
    def ids(self) -> Tensor:
        return self.tensors[IDS]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs of the tokenizer's model: `input_ids` and, depending on the model, two others.

        `attention_mask` is left out if the model was trained to read padding, as SigLIP was. `token_type_ids` are
        left out if they are all 0, the default, because a model without token types refuses them.
        """
        inputs = {IDS: self.ids}
        if MASK in self.tokenizer.model_input_names:
            inputs[MASK] = self.tensors[MASK]
        types = self.tensors.get("token_type_ids")
        return inputs if types is None or not torch.any(types) else {**inputs, "token_type_ids": types}


def encode(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, *, fill: bool = False) -> Encoded:
    """Return the texts as tokens, truncated to `max_length` or the tokenizer's limit, and padded to the longest text.

    With `fill` they are padded to that limit instead. Raises DataError if the tokenizer fails.
    """
    share = UnknownShare(tokenizer)
    encoded = _called(tokenizer, texts, slice(None), padding="max_length" if fill else "longest", return_tensors="pt")
    tensors = {name: tensor for name, tensor in encoded.items() if isinstance(tensor, Tensor)}
    share.count(tensors[IDS].numpy())
    return Encoded(tokenizer, tensors, padding_of(tokenizer, texts, tensors), share.checked())


def pieces(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, share: UnknownShare) -> Iterator[Piece]:
    """Yield the texts as tokens, truncated as by `encode` and not padded. Lists of words have a column `words` too,
    with the place of each token's word, or -1. Raises DataError if the tokenizer fails."""
    for first in range(0, len(texts.first), AT_ONCE):
        encoded = _called(tokenizer, texts, slice(first, first + AT_ONCE), padding=False)
        lengths = np.array([len(ids) for ids in encoded[IDS]], np.int64)
        columns = {
            name: np.fromiter(chain.from_iterable(values), np.int64)
            for name, values in encoded.items()
            if name in (IDS, *DEFAULTS)
        }
        if texts.by_word:
            words = chain.from_iterable(encoded.word_ids(row) for row in range(len(lengths)))
            columns[WORDS] = np.fromiter((-1 if word is None else word for word in words), np.int64)
        share.count(columns[IDS])
        yield Piece(lengths, columns)


def padding_of(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, names: Iterable[str]) -> Padding:
    """Return the padding of these tensors to the maximal length of texts."""
    known = {IDS: tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    values = {name: known.get(name, 0) for name in names}
    return Padding(_longest(tokenizer, texts), values, tokenizer.padding_side == "left")


def _longest(tokenizer: PreTrainedTokenizerBase, texts: RawTexts) -> int:
    return min(texts.max_length or MAX_TOKENS, tokenizer.model_max_length, MAX_TOKENS)


def _called(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, some: slice, **settings: object) -> Any:
    try:
        return tokenizer(
            texts.first[some],
            texts.second and texts.second[some],
            truncation=True,
            max_length=_longest(tokenizer, texts),
            is_split_into_words=texts.by_word,
            return_attention_mask=True,
            **settings,
        )
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, AssertionError, OverflowError) as fault:
        raise DataError(f"tokenizer: {in_short(fault)}") from fault


def identity_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what decides how the tokenizer converts texts."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # These two are those of the last call.
        rules = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    else:
        rules = {"vocabulary": tokenizer.get_vocab(), "settings": str(sorted(tokenizer.init_kwargs.items()))}
    names = (
        "model_max_length",
        "padding_side",
        "truncation_side",
        "pad_token_id",
        "pad_token_type_id",
        "unk_token_id",
    )
    settings = {name: str(getattr(tokenizer, name)) for name in (*names, "all_special_ids", "model_input_names")}
    digest = hashlib.sha256(json.dumps([rules, settings], sort_keys=True).encode()).hexdigest()
    return [digest, type(tokenizer).__name__, transformers.__version__, tokenizers.__version__]


def tokenized_here(raw: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return raw texts as tokens of the site's own tokenizer, whose vocabulary is declared. Raises DataError."""
    words = vocabulary_in(tokenizer.backend_tokenizer.to_str().encode()) if tokenizer.is_fast else None
    return tokenized(replace(raw, schema=raw.schema.model_copy(update={"vocabulary": words})), tokenizer)


def tokenized(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return a data set of raw texts, and its held-out share, as tokens. Raises DataError."""
    made = replace(dataset.texts.convert(dataset, dataset.texts, tokenizer), texts=None) if dataset.texts else dataset
    return replace(made, held_out=dataset.held_out and tokenized(dataset.held_out, tokenizer))


class UnknownShare:
    """The share of unknown tokens among those that stand for text.

    None for a tokenizer that has no token for unknown words, or none but the one that ends texts, such as GPT-2's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._name = tokenizer.name_or_path
        unknown = tokenizer.unk_token_id
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._unknown = None if unknown in ends else unknown
        self._special = [other for other in tokenizer.all_special_ids if other != unknown]
        self.restart()

    def restart(self) -> None:
        """Forget what was counted."""
        self._count = self._of_text = 0

    def count(self, ids: NDArray[np.int64]) -> None:
        """Count some tokens."""
        if self._unknown is not None:
            self._count += int((ids == self._unknown).sum())
            self._of_text += int(ids.size - np.isin(ids, self._special).sum())

    def checked(self) -> float | None:
        """Return the share. Raises DataError if it is 1."""
        share = self._count / self._of_text if self._of_text else None
        if share == 1:
            raise DataError(
                f"tokenizer: {self._name} knows none of the texts' words: every token is unknown. Use the tokenizer "
                "that the model was trained with, for texts in this language"
            )
        return share
