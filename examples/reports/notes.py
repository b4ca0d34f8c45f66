"""Synthetic clinical notes, generated from templates: they describe no real person.

Departments share most words. A complaint or finding of another department slips into some notes, so that no single
phrase reveals the answer, and each hospital has its own words for the same things.
"""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer
from transformers import PreTrainedTokenizerFast

COMPLAINTS = {
    "cardiology": ("chest pain on effort", "palpitations", "swollen ankles", "a racing heart"),
    "pulmonology": ("a dry cough", "shortness of breath", "wheezing at night", "coloured sputum"),
    "neurology": ("a numb left arm", "dizziness", "a sudden headache", "trembling hands"),
    "gastroenterology": ("pain after meals", "nausea", "heartburn", "a bloated belly"),
}
FINDINGS = {
    "cardiology": ("a systolic murmur", "an irregular pulse", "raised neck veins"),
    "pulmonology": ("crackles at the left base", "low oxygen saturation", "a long expiration"),
    "neurology": ("brisk reflexes", "an unsteady gait", "weak grip"),
    "gastroenterology": ("a tender epigastrium", "active bowel sounds", "an enlarged liver"),
}
DEPARTMENTS = tuple(COMPLAINTS)

WORDINGS = (
    "{age} year old {who} with {complaint} since {days} days . exam shows {finding} . {plan} .",
    "{who} , {age} , reports {complaint} for {days} days ; on examination {finding} ; {plan} .",
    "seen today : {age} y {who} . complains of {complaint} , {days} days . found : {finding} . {plan} .",
)
"""A hospital's own."""

PLANS = ("blood taken", "to be seen again in a week", "imaging asked for", "sent home with advice")
ASTRAY = 0.15
"""How often a complaint or a finding is one of any department."""


class Note(NamedTuple):
    text: str
    department: str
    complaint: str


def notes(count: int, wording: str, rng: Random, weights: tuple[int, ...] = (1, 1, 1, 1)) -> list[Note]:
    """Return `count` notes; `weights` are the frequencies of the departments."""
    return [_note(rng.choices(DEPARTMENTS, weights)[0], wording, rng) for _ in range(count)]


def _note(department: str, wording: str, rng: Random) -> Note:
    complaint, finding = (
        rng.choice(phrases[rng.choice(DEPARTMENTS) if rng.random() < ASTRAY else department])
        for phrases in (COMPLAINTS, FINDINGS)
    )
    facts = {"age": rng.randint(18, 90), "days": rng.randint(1, 30), "who": rng.choice(("woman", "man"))}
    text = wording.format(complaint=complaint, finding=finding, plan=rng.choice(PLANS), **facts)
    return Note(text, department, complaint)


def write_csv(file: Path, rows: list[Note]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([("text", "label"), *((note.text, note.department) for note in rows)])


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer with the words of the templates, the same for every hospital. Return the number of words."""
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    phrases = [*WORDINGS, *PLANS, *DEPARTMENTS, "woman man", " ".join(map(str, range(1, 91)))]
    phrases += [phrase for group in (COMPLAINTS, FINDINGS) for several in group.values() for phrase in several]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(phrases, WordLevelTrainer(special_tokens=special, show_progress=False))
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    return tokenizer.get_vocab_size()
