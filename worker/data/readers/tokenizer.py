"""Conversion of texts to a model's `input_ids`, by a tokenizer of transformers."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tessera.worker.data.dataset import DataError, Dataset, Padding, RawTexts, in_short
from tessera.worker.data.readers.pretrained import load_pretrained

MAX_TOKENS = 1 << 20
RUN = "run"
"""The setting of a data set that is converted with the tokenizer of each run."""
AT_ONCE = 4096
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
    words: list[list[int | None]]
    """The word of each token, [texts][tokens], if the texts are lists of words."""
    padding: Padding
    """The padding to the maximal length of texts."""
    unknown: float | None
    """The share of unknown tokens among those that stand for text, or None if the tokenizer knows every text."""

    @property
    def ids(self) -> Tensor:
        return self.tensors["input_ids"]

    @property
    def empty(self) -> Tensor:
        """The mask of padding, bool [texts, tokens]."""
        return self.tensors["attention_mask"] == 0

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs of the tokenizer's model: `input_ids` and, depending on the model, two others.

        `attention_mask` is left out if the model was trained to read padding, as SigLIP was. `token_type_ids` are
        left out if they are all 0, the default, because a model without token types refuses them.
        """
        inputs = {"input_ids": self.ids}
        if "attention_mask" in self.tokenizer.model_input_names:
            inputs["attention_mask"] = self.tensors["attention_mask"]
        types = self.tensors.get("token_type_ids")
        return inputs if types is None or not torch.any(types) else {**inputs, "token_type_ids": types}


def encode(tokenizer: PreTrainedTokenizerBase, texts: RawTexts, *, fill: bool = False) -> Encoded:
    """Return the texts as tokens, truncated to `max_length` or the tokenizer's limit, and padded to the longest text.

    With `fill` they are padded to that limit instead. Raises DataError if the tokenizer fails.
    """
    longest = min(texts.max_length or MAX_TOKENS, tokenizer.model_max_length, MAX_TOKENS)
    settings = {
        "padding": "max_length" if fill else "longest",
        "truncation": True,
        "max_length": longest,
        "is_split_into_words": texts.by_word,
        "return_attention_mask": True,
        "return_tensors": "pt",
    }
    pieces, words = [], []
    for first in range(0, len(texts.first), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        try:
            encoded: Any = tokenizer(texts.first[some], texts.second and texts.second[some], **settings)
        except (ValueError, TypeError, LookupError, AssertionError, OverflowError) as fault:
            raise DataError(f"tokenizer: {in_short(fault)}") from fault
        pieces.append({name: tensor for name, tensor in encoded.items() if isinstance(tensor, Tensor)})
        words += [encoded.word_ids(row) for row in range(len(texts.first[some]))] if texts.by_word else []
    width = max(piece["input_ids"].shape[1] for piece in pieces)
    on_left = tokenizer.padding_side == "left"
    known = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    padding = Padding(longest, {name: known.get(name, 0) for name in pieces[0]}, on_left)
    to_longest = replace(padding, width=width)
    tensors = {name: torch.cat([to_longest.fill(name, piece[name]) for piece in pieces]) for name in pieces[0]}
    unknown = _unknown(tokenizer, tensors["input_ids"])
    if unknown == 1:
        raise DataError(
            f"tokenizer: {tokenizer.name_or_path} knows none of the texts' words: every token is unknown. Use the "
            "tokenizer that the model was trained with, for texts in this language"
        )
    gaps = [[None] * (width - len(of_text)) for of_text in words]
    return Encoded(
        tokenizer,
        tensors,
        [gap + of_text if on_left else of_text + gap for gap, of_text in zip(gaps, words, strict=True)],
        padding,
        unknown,
    )


def tokenized(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return a data set of raw texts, and its held-out share, as tokens. Raises DataError."""
    made = replace(dataset.texts.convert(dataset, dataset.texts, tokenizer), texts=None) if dataset.texts else dataset
    return replace(made, held_out=dataset.held_out and tokenized(dataset.held_out, tokenizer))


def _unknown(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> float | None:
    """Return the share of unknown tokens among those that stand for text.

    None for a tokenizer that has no token for unknown words, or none but the one that ends texts, such as GPT-2's.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return None
    special = torch.tensor([other for other in tokenizer.all_special_ids if other != unknown], dtype=ids.dtype)
    of_text = int(ids.numel() - torch.isin(ids, special).sum())
    return int((ids == unknown).sum()) / of_text if of_text else None
