"""From texts to a model's `input_ids`, by a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tessera.worker.data.dataset import DataError, Padding
from tessera.worker.data.readers.pretrained import load_pretrained

MAX_TOKENS = 1 << 20
AT_ONCE = 4096
"""Texts that are made tokens of together: what a tokenizer gives takes many times the room of the tensors."""

MAX_SHOWN = 300

Texts = Sequence[str] | Sequence[Sequence[str]]


def tokenizer_of(option: str, source: str, **more: object) -> PreTrainedTokenizerBase:
    """Return a tokenizer that can pad: by its end of text if by nothing else, which the attention mask tells apart.

    Raises DataError.
    """
    tokenizer: PreTrainedTokenizerBase = load_pretrained(option, source, AutoTokenizer.from_pretrained, **more)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError(f"{option}: {source} has no token to pad with: give it a pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens, all of one length. `tensors` are what the tokenizer gives, int64 [texts, tokens] each."""

    tokenizer: PreTrainedTokenizerBase
    tensors: dict[str, Tensor]
    words: list[list[int | None]]
    """The word that each token is of, [texts][tokens], where texts were given word by word."""
    padding: Padding
    """How the texts are made as long as any may be."""

    @property
    def ids(self) -> Tensor:
        return self.tensors["input_ids"]

    @property
    def empty(self) -> Tensor:
        """Where there is only padding, bool [texts, tokens]."""
        return self.tensors["attention_mask"] == 0

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the tokenizer's model is given: `input_ids`, and of these what it takes.

        `attention_mask`, unless the model has learnt to read padding, as SigLIP has; `token_type_ids`, unless they
        are all 0, which is what a model takes in their absence, and one that knows no token types refuses them.
        """
        found = {"input_ids": self.ids}
        if "attention_mask" in self.tokenizer.model_input_names:
            found["attention_mask"] = self.tensors["attention_mask"]
        types = self.tensors.get("token_type_ids")
        return found if types is None or not torch.any(types) else {**found, "token_type_ids": types}


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    seconds: Sequence[str] | None = None,
    *,
    max_length: int | None,
    fill: bool = False,
    by_word: bool = False,
) -> Encoded:
    """Return the texts as tokens, cut to `max_length` or what the tokenizer's model takes, and padded to the longest.

    With `fill` they are padded to that length whatever the texts; `by_word`, each text is a list of words. Raises
    DataError for what the tokenizer cannot do.
    """
    longest = min(max_length or MAX_TOKENS, tokenizer.model_max_length, MAX_TOKENS)
    settings = {
        "padding": "max_length" if fill else "longest",
        "truncation": True,
        "max_length": longest,
        "is_split_into_words": by_word,
        "return_attention_mask": True,
        "return_tensors": "pt",
    }
    pieces, words = [], []
    for some, of_them in _in_turn(texts, seconds):
        try:
            found: Any = tokenizer(some, of_them, **settings)
        except (ValueError, TypeError, LookupError, AssertionError, OverflowError) as fault:
            raise DataError(f"tokenizer: {' '.join(str(fault).split())[:MAX_SHOWN]}") from fault
        pieces.append({name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)})
        words += [found.word_ids(row) for row in range(len(some))] if by_word else []
    width = max(piece["input_ids"].shape[1] for piece in pieces)
    on_left = tokenizer.padding_side == "left"
    known = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    padding = Padding(longest, {name: known.get(name, 0) for name in pieces[0]}, on_left)
    alike = replace(padding, width=width)
    tensors = {name: torch.cat([alike.fill(name, piece[name]) for piece in pieces]) for name in pieces[0]}
    gaps = [[None] * (width - len(of_text)) for of_text in words]
    return Encoded(
        tokenizer,
        tensors,
        [gap + of_text if on_left else of_text + gap for gap, of_text in zip(gaps, words, strict=True)],
        padding,
    )


def _in_turn(texts: Texts, seconds: Sequence[str] | None) -> Iterator[tuple[Texts, Sequence[str] | None]]:
    for first in range(0, len(texts), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        yield texts[some], None if seconds is None else seconds[some]
