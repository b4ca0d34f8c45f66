"""Small models of the demo's own, trained on public texts for some seconds: they stand for published models.

`python -m tessera.examples.clinic.base TASK FOLDER STEPS` writes one with its tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tessera.examples.clinic.notes import CLASSES, PUBLIC, Note, notes, question, words
from tessera.worker.data.targets.spans import WORD
from tessera.worker.model.forward import IGNORED

SEED = 1
RATE = 4e-3
AT_ONCE = 16
"""Patients in a step of pre-training."""
TEXTS_SHARE = 0.3
"""The weight of the texts' own loss beside that of the answers: a language model learns to copy from it."""

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 96, "initializer_range": 0.1, "pad_token_id": 0,
}  # fmt: skip
SPECIAL = {
    "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "<|end|>"
}  # fmt: skip
ROLES = ("<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Batch = dict[str, Tensor]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of the grammar. It is made from no hospital's note."""
    known = (*SPECIAL.values(), *ROLES, *words())
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, chat_template=TEMPLATE, additional_special_tokens=list(ROLES), **SPECIAL
    )


def entities(encode: PreTrainedTokenizerFast, some: Sequence[Note]) -> Batch:
    """Return notes with the class of each word, which is one token."""
    rows, numbers = [], encode.get_vocab()
    for note in some:
        found = list(WORD.finditer(note.text))
        targets = [_class_of(note, word.start()) for word in found]
        rows.append(([numbers[word.group()] for word in found], targets))
    return _padded(rows)


def _class_of(note: Note, place: int) -> int:
    """Return the class of the word that begins at a place of the text."""
    for span in note.spans:
        if span["start"] <= place < span["end"]:
            return CLASSES.index(f"{'B' if place == span['start'] else 'I'}-{span['label']}")
    return 0


def answers(encode: PreTrainedTokenizerFast, some: Sequence[Note], rng: Random) -> Batch:
    """Return questions about notes. Labels are the tokens of the answers, and the token that ends them."""
    rows = []
    for note in some:
        asked, answer = question(note, rng)
        prompt = encode(f"<|user|>{asked}\n\n{note.text}<|end|><|assistant|>")["input_ids"]
        scored = encode(f"{answer}<|end|>")["input_ids"]
        rows.append(([*prompt, *scored], [IGNORED] * len(prompt) + scored))
    return _padded(rows)


def _padded(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Return `input_ids`, `attention_mask` and `labels`, int64 [rows, tokens]."""
    width = max(len(ids) for ids, _ in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), IGNORED)
    for row, (tokens, targets) in enumerate(rows):
        ids[row, : len(tokens)], labels[row, : len(targets)] = torch.tensor(tokens), torch.tensor(targets)
    return {"input_ids": ids, "attention_mask": (ids != SHAPE["pad_token_id"]).long(), "labels": labels}


def small_model(task: str, encode: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return an encoder or a language model with random weights."""
    torch.manual_seed(SEED)
    shape = {**SHAPE, "vocab_size": len(encode)}
    if task == "entities":
        names = dict(enumerate(CLASSES))
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = {**shape, **dropout, "id2label": names, "label2id": {name: number for number, name in names.items()}}
        return BertForTokenClassification(BertConfig.from_dict(config))
    ends = {"bos_token_id": None, "eos_token_id": encode.eos_token_id, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig.from_dict({**shape, **ends}))


def pretrain(model: PreTrainedModel, batch_of: Callable[[Sequence[Note]], Batch], steps: int) -> None:
    """Train on public notes."""
    rng = Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = batch_of(list(notes(PUBLIC, AT_ONCE, rng)))
        optimizer.zero_grad()
        outputs = model(**batch)
        loss = outputs.loss
        if isinstance(model, LlamaForCausalLM):
            following = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, IGNORED)
            texts = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), following)
            loss = loss + TEXTS_SHARE * texts
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def write(task: str, out: Path, steps: int) -> None:
    """Write a pre-trained model with its tokenizer."""
    torch.set_num_threads(1)
    encode, rng = tokenizer(), Random(SEED)
    model = small_model(task, encode)
    pretrain(model, lambda some: entities(encode, some) if task == "entities" else answers(encode, some, rng), steps)
    model.save_pretrained(out)
    encode.save_pretrained(out)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
