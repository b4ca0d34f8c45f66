"""Conversion of texts to a model's `input_ids`, by a tokenizer of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

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
from tessera.worker.data.dataset import Dataset, Padding, RawTexts
from tessera.worker.data.load_report import Truncation
from tessera.worker.data.readers.pretrained import load_pretrained
from tessera.worker.data.readers.tokens import MASK, USUAL, TokenBatch
from tessera.worker.errors import DataError, in_short

MAX_TOKENS = 1 << 20
RUN = "run"
"""The setting of a data set that is converted with the tokenizer of each run."""
WORDS = "words"
AT_ONCE = 512
"""Number of texts to encode together: a tokenizer's result needs many times the memory of the tensors."""


def load_tokenizer(option: str, source: str, **more: object) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local folder, or of a name on the hub.

    Raises DataError, also for a tokenizer without words, which transformers makes of a folder without vocabulary.
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
    """Return a tokenizer that pads on the right, with a padding token: its end-of-text token if it has no other.

    Padding on the left, as tokenizers of language models are often saved for generation, moves the positions of some
    models' tokens, and asks for a text's first token after padding. Raises DataError.
    """
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
    tokenizer.padding_side = "right"
    return tokenizer


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as tokens, all of one length. `tensors` are the tokenizer's results, int64 [texts, tokens] each."""

    tokenizer: PreTrainedTokenizerBase
    tensors: dict[str, Tensor]
    padding: Padding
    """The padding to the maximal length of texts."""
    unknown: float | None
    """The share of unknown tokens among those that stand for text, or None if the tokenizer knows every text."""
    truncation: Truncation

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


def encode(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, *, fill: bool = False) -> EncodedTexts:
    """Return the texts as tokens, truncated to `max_length` or the tokenizer's limit, and padded to the longest text.

    With `fill` they are padded to that limit instead. Raises DataError if the tokenizer fails.
    """
    counts = TokenCounts(tokenizer, texts)
    some = _some(texts, slice(None))
    encoded = _called(
        tokenizer, some, padding="max_length" if fill else "longest", return_tensors="pt", **counts.cut_settings
    )
    tensors = {name: tensor for name, tensor in encoded.items() if isinstance(tensor, Tensor)}
    counts.add(tensors[IDS].numpy(), counts.whole(some, tensors[MASK].sum(dim=1).numpy()))
    return EncodedTexts(
        tokenizer, tensors, padding_of(tokenizer, texts, tensors), counts.unknown(), counts.truncation()
    )


def pieces(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, counts: TokenCounts) -> Iterator[TokenBatch]:
    """Yield the texts as tokens, truncated as by `encode` and not padded. Lists of words have a column `words` too,
    with the place of each token's word, or -1. Raises DataError if the tokenizer fails."""
    end = tokenizer.eos_token_id if texts.with_end else None
    for first in range(0, len(texts.first), AT_ONCE):
        some = _some(texts, slice(first, first + AT_ONCE))
        encoded = _called(tokenizer, some, padding=False, **counts.cut_settings)
        rows = {name: values for name, values in encoded.items() if name in (IDS, *USUAL)}
        whole = counts.whole(some, np.array(list(map(len, rows[IDS])), np.int64))
        for row, ids in enumerate(rows[IDS] if end is not None else ()):
            if ids[-1:] != [end]:
                whole[row] += 1
                if whole[row] <= counts.limit:
                    for name, values in rows.items():
                        values[row].append(end if name == IDS else USUAL[name])
        lengths = np.array(list(map(len, rows[IDS])), np.int64)
        columns = {name: np.fromiter(chain.from_iterable(values), np.int64) for name, values in rows.items()}
        if texts.by_word:
            words = chain.from_iterable(encoded.word_ids(row) for row in range(len(lengths)))
            columns[WORDS] = np.fromiter((-1 if word is None else word for word in words), np.int64)
        counts.add(columns[IDS], whole)
        yield TokenBatch(lengths, columns)


def padding_of(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, names: Iterable[str]) -> Padding:
    """Return the padding of these tensors to the maximal length of texts."""
    known = {IDS: tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    values = {name: known.get(name, 0) for name in names}
    return Padding(_longest(tokenizer, texts), values)


def _longest(tokenizer: PreTrainedTokenizerBase, texts: RawTexts) -> int:
    return min(texts.max_length or MAX_TOKENS, tokenizer.model_max_length, MAX_TOKENS)


class TextSlice(NamedTuple):
    """Some texts, with the second ones of pairs, or lists of words."""

    first: Sequence[Any]
    second: Sequence[str] | None = None
    by_word: bool = False

    def lengths(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the numbers of tokens, not truncated. Raises DataError."""
        return list(map(len, _called(tokenizer, self, truncation=False, verbose=False)[IDS]))


def _some(texts: RawTexts, at: slice) -> TextSlice:
    return TextSlice(texts.first[at], texts.second and texts.second[at], texts.by_word)


def _called(tokenizer: PreTrainedTokenizerBase, some: TextSlice, **settings: Any) -> Any:
    try:
        encoded = tokenizer(
            some.first, some.second, is_split_into_words=some.by_word, return_attention_mask=True, **settings
        )
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, AssertionError, OverflowError) as fault:
        raise DataError(f"tokenizer: {in_short(fault)}") from fault
    # A tokenizer adds its special tokens after it has cut a text off, and may have any number of them.
    if (most := settings.get("max_length")) and (longest := max(map(len, encoded[IDS]), default=0)) > most:
        raise DataError(
            f"tokenizer: a text has {longest} tokens, although max_length is {most}: use a tokenizer that adds fewer "
            "special tokens, or raise max_length"
        )
    return encoded


def identity_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the settings and versions that decide the tokens of texts."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # The last call of the tokenizer set these two.
        rules = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    else:
        rules = {"vocabulary": tokenizer.get_vocab(), "settings": str(sorted(tokenizer.init_kwargs.items()))}
    names = (
        "model_max_length",
        "truncation_side",
        "pad_token_id",
        "pad_token_type_id",
        "unk_token_id",
        "special_tokens_map",
        "chat_template",
    )
    settings = {name: str(getattr(tokenizer, name)) for name in (*names, "all_special_ids", "model_input_names")}
    digest = hashlib.sha256(json.dumps([rules, settings], sort_keys=True).encode()).hexdigest()
    return [digest, type(tokenizer).__name__, transformers.__version__, tokenizers.__version__]


def tokenized_here(raw: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return raw texts as tokens of the site's own tokenizer, which the schema describes. Raises DataError."""
    words = vocabulary_in(tokenizer.backend_tokenizer.to_str().encode()) if tokenizer.is_fast else None
    said = {"vocabulary": words, "tokens": max(tokenizer.get_vocab().values()) + 1}
    return tokenized(replace(raw, schema=raw.schema.model_copy(update=said)), tokenizer)


def tokenized(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return a data set of raw texts, and its held-out share, as tokens. Raises DataError."""
    made = replace(dataset.texts.convert(dataset, dataset.texts, tokenizer), texts=None) if dataset.texts else dataset
    return replace(made, held_out=dataset.held_out and tokenized(dataset.held_out, tokenizer))


class TokenCounts:
    """Counts of a data set's texts and tokens, for people at its site."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: RawTexts) -> None:
        self._tokenizer, self.limit = tokenizer, _longest(tokenizer, texts)
        self._most = min(tokenizer.model_max_length, MAX_TOKENS)
        self._name = tokenizer.name_or_path
        unknown = tokenizer.unk_token_id
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._unknown = None if unknown in ends else unknown
        self._special = [other for other in tokenizer.all_special_ids if other != unknown]
        self._unknowns = self._of_text = 0
        self._texts = self._cut = self._tokens = self._lost = self._longest = 0

    @property
    def cut_settings(self) -> dict[str, Any]:
        return {"truncation": True, "max_length": self.limit}

    def whole(self, some: TextSlice, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of texts before truncation, int64 [texts], by those after it."""
        whole, full = lengths.copy(), np.flatnonzero(lengths >= self.limit).tolist()
        if full:
            longer = some._replace(
                first=[some.first[row] for row in full], second=some.second and [some.second[row] for row in full]
            )
            whole[full] = longer.lengths(self._tokenizer)
        return whole

    def add(self, ids: NDArray[np.int64], whole: NDArray[np.int64]) -> None:
        """Count the tokens of some texts, which have these lengths before truncation, int64 [texts]."""
        if self._unknown is not None:
            self._unknowns += int((ids == self._unknown).sum())
            self._of_text += int(ids.size - np.isin(ids, self._special).sum())
        lost = (whole - self.limit).clip(min=0)
        self._texts, self._cut = self._texts + len(whole), self._cut + int((lost > 0).sum())
        self._tokens, self._lost = self._tokens + int(whole.sum()), self._lost + int(lost.sum())
        self._longest = max(self._longest, int(whole.max(initial=0)))

    def truncation(self) -> Truncation:
        """Return the number of texts that are cut off."""
        lost = self._lost / self._tokens if self._tokens else 0.0
        return Truncation(self._texts, self._cut, self._longest, self.limit, lost, self._most)

    def unknown(self) -> float | None:
        """Return the share of unknown tokens among those that stand for text.

        None for a tokenizer without a token for unknown words, or whose end-of-text token stands for them, such as
        GPT-2's. Raises DataError if it is 1.
        """
        share = self._unknowns / self._of_text if self._of_text else None
        if share == 1:
            raise DataError(
                f"tokenizer: {self._name} knows none of the texts' words: every token is unknown. Use the tokenizer "
                "that the model was trained with, for texts in this language"
            )
        return share
