"""From texts to a model's `input_ids`, by a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from worker.data.dataset import DataError
from worker.data.pretrained import load_pretrained

MAX_TOKENS = 1 << 20
MAX_SHOWN = 300

Texts = Sequence[str] | Sequence[Sequence[str]]


def tokenizer_of(option: str, source: str, **more: object) -> PreTrainedTokenizerBase:
    """A tokenizer that can pad: by its end of text if by nothing else, which the attention mask tells apart.

    Raises DataError.
    """
    tokenizer: PreTrainedTokenizerBase = load_pretrained(option, source, AutoTokenizer.from_pretrained, **more)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError(f"{option}: {source} has no token to pad with: give it a pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    seconds: Sequence[str] | None = None,
    *,
    max_length: int | None,
    fill: bool = False,
    **more: object,
) -> Encoded:
    """The texts as tokens, cut to `max_length` or what the tokenizer's model takes, and padded to the longest.

    With `fill` they are padded to that length whatever the texts. Raises DataError for what the tokenizer cannot do.
    """
    length = min(max_length or MAX_TOKENS, tokenizer.model_max_length, MAX_TOKENS)
    try:
        found = tokenizer(
            texts,
            seconds,
            padding="max_length" if fill else "longest",
            truncation=True,
            max_length=length,
            return_attention_mask=True,
            return_tensors="pt",
            **more,
        )
    except (ValueError, TypeError, LookupError, AssertionError, OverflowError) as fault:
        raise DataError(f"tokenizer: {' '.join(str(fault).split())[:MAX_SHOWN]}") from fault
    return Encoded(tokenizer, found)


@dataclass(frozen=True)
class Encoded:
    """Texts as a tokenizer has made tokens of them."""

    tokenizer: PreTrainedTokenizerBase
    found: Any
    """transformers' own record."""

    @property
    def ids(self) -> Tensor:
        """int64 [texts, tokens]"""
        tensor: Tensor = self.found["input_ids"]
        return tensor

    @property
    def padding(self) -> Tensor:
        """Where there is only padding, bool [texts, tokens]."""
        tensor: Tensor = self.found["attention_mask"] == 0
        return tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the tokenizer's model is given: `input_ids`, and of these what it takes.

        `attention_mask`, unless the model has learnt to read padding, as SigLIP has; `token_type_ids`, unless they
        are all 0, which is what a model takes in their absence, and one that knows no token types refuses them.
        """
        found = {"input_ids": self.ids}
        if "attention_mask" in self.tokenizer.model_input_names:
            found["attention_mask"] = self.found["attention_mask"]
        types = self.found.get("token_type_ids")
        return found if types is None or not torch.any(types) else {**found, "token_type_ids": types}
