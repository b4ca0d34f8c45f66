"""A real text task that every machine with Python has: which part of the standard library a docstring is from.

Real English prose by many hands, eight classes of unequal size, and words that give an answer away only sometimes. It
is read from the running interpreter's own library, so figures differ a little between versions of Python. A text
encoder is pre-trained here on the same question about other parts of the library, whose docstrings no site has.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordPieceTrainer

from tessera.worker.data.dataset import Dataset

AREAS = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
OTHERS = (
    "collections", "concurrent", "ctypes", "curses", "dbm", "encodings", "html", "http", "json", "pydoc_data", "re",
    "sqlite3", "urllib", "wsgiref", "xmlrpc", "zoneinfo", "distutils", "turtledemo",
)  # fmt: skip
"""What the encoder is pre-trained on."""

VOCABULARY = 2000
TOKENS = 32
MIN_WORDS = 5
TEST_SHARE = 0.2

BERT = {
    "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "hidden_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "intermediate_size": 96, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def passages(areas: Sequence[str] = AREAS) -> list[tuple[str, int]]:
    """Every paragraph of every docstring in the areas, in a fixed order, with the area's number; no text twice."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, int] = {}
    for number, area in enumerate(areas):
        for file in sorted((root / area).rglob("*.py")):
            if "test" not in file.relative_to(root).parts:
                found |= {text: number for text in _paragraphs(file) if text not in found}
    return sorted(found.items())


def _paragraphs(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                if len(text.split()) >= MIN_WORDS:
                    yield text


def tokenizer_of(texts: list[str]) -> Tokenizer:
    """A WordPiece vocabulary learnt from the training texts; `[CLS]` first, cut and padded to `TOKENS`."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))  # noqa: S106 (a token of text)
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(texts, WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special))
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    return tokenizer


def docstrings() -> tuple[Dataset, Dataset]:
    """The training and the test part: `input_ids`, `attention_mask` int64 [n, TOKENS], `labels` int64 [n]."""
    train, test = _split()
    tokenizer = tokenizer_of([text for text, _ in train])
    return _encoded(tokenizer, train), _encoded(tokenizer, test)


def others() -> Dataset:
    """The other areas, in the same vocabulary."""
    tokenizer = tokenizer_of([text for text, _ in _split()[0]])
    return _encoded(tokenizer, passages(OTHERS))


def _split() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    texts = passages()
    random.Random(0).shuffle(texts)  # noqa: S311 (no secret: the same split each time)
    cut = int(len(texts) * TEST_SHARE)
    return texts[cut:], texts[:cut]


def _encoded(tokenizer: Tokenizer, texts: list[tuple[str, int]]) -> Dataset:
    encoded = tokenizer.encode_batch([text for text, _ in texts])
    return Dataset(
        {
            "input_ids": torch.tensor([each.ids for each in encoded]),
            "attention_mask": torch.tensor([each.attention_mask for each in encoded]),
            "labels": torch.tensor([number for _, number in texts]),
        }
    )
