"""Instructions with answers, made from templates, and their tokens.

The words of a text are drawn anew each time, in any order, so a model that has only memorised its texts fails on new
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tessera.worker.model.forward import IGNORED

Words = Sequence[str]

WORDS = (
    "red", "old", "small", "tall", "quiet", "bright", "fox", "stone", "river", "lamp", "door", "boat",
    "tree", "bird", "cloud", "hill", "field", "road", "glass", "paper", "bread", "apple", "chair", "table",
)  # fmt: skip
NUMBERS = ("one", "two", "three", "four", "five", "six")
LENGTHS = (2, 6)
"""The fewest and the most words of a text."""


class Kind(NamedTuple):
    """A kind of instruction: several wordings of it, and the words of its answer."""

    wordings: tuple[str, ...]
    answer: Callable[[Words], Words]


KINDS = {
    "capitals": Kind(
        ("write in capitals", "put into upper case", "shout", "all letters large"),
        lambda words: [word.upper() for word in words],
    ),
    "reverse": Kind(
        ("write backwards", "reverse the order", "start from the end", "last word first"),
        lambda words: words[::-1],
    ),
    "count": Kind(
        ("how many words", "count the words", "number of words", "how long is the list"),
        lambda words: [NUMBERS[len(words) - 1]],
    ),
}
"""The sites' instructions. The small model that the demo makes has seen none of them."""

EXERCISES = {
    "repeat": Kind(("repeat", "say again", "copy"), lambda words: words),
    "last": Kind(("last word", "how does it end"), lambda words: words[-1:]),
    "last two": Kind(("last word , then the one before",), lambda words: words[:-3:-1]),
    "without the first": Kind(("leave out the first", "drop the first word"), lambda words: words[1:]),
    "twice": Kind(("each word twice", "say every word two times"), lambda words: _in_turn(words, words)),
    "number": Kind(("number the words", "with numbers"), lambda words: _in_turn(NUMBERS, words)),
    "both cases": Kind(("large and small", "both letters"), lambda words: _in_turn(words, _upper(words))),
    "first large": Kind(("first word in large letters",), lambda words: _upper(words[:1])),
}
"""The instructions that this model is pre-trained on."""


def _upper(words: Words) -> Words:
    return [word.upper() for word in words]


def _in_turn(first: Words, second: Words) -> Words:
    return [word for pair in zip(first, second, strict=False) for word in pair]


class Text(NamedTuple):
    instruction: str
    answer: str


def texts(kind: Kind, count: int, rng: Random) -> list[Text]:
    """Return this many instructions of a kind, each with its answer."""
    return [_text(kind, rng) for _ in range(count)]


def _text(kind: Kind, rng: Random) -> Text:
    words = rng.sample(WORDS, rng.randint(*LENGTHS))
    instruction = f"{rng.choice(kind.wordings)} : {' '.join(words)} . answer :"
    return Text(instruction, " ".join(kind.answer(words)))


def encode(tokenizer: PreTrainedTokenizerBase, some: Sequence[Text]) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask` and `labels`, int64 [texts, tokens].

    Labels are -100 but at the answer and the end of the text: only they count in the loss.
    """
    rows = []
    for text in some:
        asked = tokenizer(text.instruction)["input_ids"]
        answer = tokenizer(" " + text.answer, add_special_tokens=False)["input_ids"]
        rows.append((asked, [*answer, tokenizer.eos_token_id]))
    width = max(len(asked) + len(answer) for asked, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, (asked, answer) in enumerate(rows):
        end = len(asked) + len(answer)
        ids[row, :end] = torch.tensor([*asked, *answer])
        mask[row, :end] = 1
        labels[row, len(asked) : end] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def write_texts(file: Path, tokenizer: PreTrainedTokenizerBase, some: Sequence[Text]) -> None:
    """Write a data set of the kind `arrays`."""
    save_file(encode(tokenizer, some), file)


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with a token for each word of the texts above, in small letters and in capitals."""
    wordings = [wording for kind in (*KINDS.values(), *EXERCISES.values()) for wording in kind.wordings]
    words = " ".join(["<pad> <s> </s> <unk> : . answer", *WORDS, *_upper(WORDS), *NUMBERS, *wordings]).split()
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
