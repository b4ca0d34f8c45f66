"""Tokenizers, image processors and pictures in folders, made small and by no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PAD, UNK, CLS, SEP = range(4)
"""Their token numbers; the words follow from 4 on."""


def bert_tokenizer(folder: Path, words: Sequence[str], **settings: object) -> Path:
    """Makes [CLS] a text [SEP], and gives a second one a type of its own; pieces of a word begin with ##."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return _saved(folder, tokenizer, model_input_names=inputs, **names, **settings)


def plain_tokenizer(folder: Path, words: Sequence[str], **settings: object) -> Path:
    """Makes a token of each word and no others: 0 of unknown ones, 1 ends a text, the words follow from 2 on."""
    vocabulary = {token: number for number, token in enumerate(("<unk>", "<end>", *words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return _saved(folder, tokenizer, **{"unk_token": "<unk>", "eos_token": "<end>", **settings})


def _saved(folder: Path, tokenizer: Tokenizer, **settings: object) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    return folder


def image_processor(folder: Path, side: int) -> Path:
    """Shrinks the shorter edge to `side`, cuts out the middle, and takes 0 to 1 to -1 to 1."""
    CLIPImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)
    return folder


def picture(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (12, 10)) -> Path:
    """A picture of one colour, `size` wide and high."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)
    return file
