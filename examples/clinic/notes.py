"""Synthetic clinical notes from a grammar, with the entities in them, and questions with their answers.

They describe no real person, and the medicines do not exist. Each source writes in its own way, and has its own part
of the medicines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

FIRST = ("bra", "cor", "del", "fen", "lum", "mor", "nov", "pra", "sel", "tor", "vel", "zan")
MEDICINES = tuple(first + last for first in FIRST for last in ("april", "olol", "imycin", "azole"))
PROBLEMS = tuple(
    f"{how} {what}"
    for how in ("acute", "chronic", "mild", "severe", "recurrent")
    for what in ("asthma", "gout", "anaemia", "migraine", "angina", "eczema", "heart failure", "back pain")
)
TYPES = ("problem", "medicine", "dose")
CLASSES = ("O", *(f"{begin}-{type_}" for type_ in TYPES for begin in "BI"))


class Style(NamedTuple):
    """How the authors of a source write."""

    openings: tuple[str, ...]
    treated: tuple[str, ...]
    """Sentences with a problem, the medicine for it and its dose."""
    fillers: tuple[str, ...]
    """Sentences with a problem that the patient does not have, which is no entity, or with none."""
    dose: tuple[str, ...]
    medicines: tuple[str, ...]


def _share(number: int) -> tuple[str, ...]:
    """Return a quarter of the medicines. Shares of different numbers have none in common."""
    return tuple(Random(0).sample(MEDICINES, len(MEDICINES))[number::4])


PUBLIC = Style(
    ("a {age} year old {sex} .", "case : {sex} aged {age} .", "{sex} of {age} years ,"),
    (
        "for {problem} , {medicine} {dose} was given .",
        "{medicine} at {dose} helps against {problem} .",
        "{dose} of {medicine} is advised in {problem} ,",
        "in {problem} one may try {medicine} at a dose of {dose} .",
        "problem : {problem} , medicine : {medicine} , dose : {dose} .",
        "{medicine} ( {dose} ) , {problem}",
    ),
    ("{problem} was ruled out .", "the course was good .", "it was not {problem} ,", "no {problem} ."),
    ("{n} mg", "{n} mg daily", "{n} drops", "{n} mg three times a day"),
    MEDICINES,
)
"""Cases of textbooks, on which the base is trained beforehand. No hospital wrote them."""

HOSPITALS = {
    "alder-hospital": Style(
        ("this {sex} , {age} , was seen on the ward today .",),
        (
            "{problem} is being treated with {medicine} , {dose} .",
            "we have started {medicine} , {dose} , because of {problem} .",
        ),
        ("there is no sign of {problem} .", "the mother suffers from {problem} .", "review in a week ."),
        ("{n} milligrams once a day", "{n} milligrams twice a day"),
        _share(0),
    ),
    "birch-clinic": Style(
        ("{sex} {age} y ;",),
        ("dx {problem} ; rx {medicine} {dose} ;", "{problem} = {medicine} {dose} ;"),
        ("neg for {problem} ;", "fhx {problem} ;", "obs stable ;"),
        ("{n} mg od", "{n} mg bd", "{n} mcg od"),
        _share(1),
    ),
    "cedar-infirmary": Style(
        ("patient : {sex} / age : {age} /",),
        (
            "diagnosis : {problem} / dose : {dose} / drug : {medicine} /",
            "drug : {medicine} ( {dose} ) for : {problem} /",
        ),
        ("excluded : {problem} /", "family : {problem} /", "diet : normal /"),
        ("{n} mg x 1", "{n} mg x 2", "{n} ml x 3"),
        _share(2),
    ),
}
EXTERNAL = {
    "letters-archive": Style(
        ("dear colleague , i saw this {age} year old {sex} .",),
        (
            "{problem} has been treated by me with {medicine} , {dose} .",
            "please continue {medicine} , {dose} , for {problem} .",
        ),
        ("no sign of {problem} was seen .", "a brother has {problem} .", "many thanks ."),
        ("{n} milligrams once a day", "{n} mg bd"),
        (*_share(0), *_share(1), *_share(2)),
    )
}
"""Letters by other authors about the hospitals' patients and medicines."""
NEW_SITE = {
    "dune-hospital": Style(
        ("{sex} , age {age} ;",),
        (
            "diagnosis : {problem} ; rx : {medicine} , {dose} ;",
            "{problem} : started on {medicine} ( {dose} ) ;",
            "because of {problem} = {medicine} {dose} ;",
        ),
        ("excluded {problem} ;", "fhx : {problem} ;", "no sign of {problem} ;", "review in two weeks ;"),
        ("{n} mg twice a day", "{n} ml od", "{n} mg x 1"),
        _share(3),
    )
}
"""A hospital that trains nothing. It has other medicines, and writes a little like each of the three."""


class Treatment(NamedTuple):
    problem: str
    medicine: str
    dose: str


class Note(NamedTuple):
    patient: str
    text: str
    spans: tuple[dict[str, Any], ...]
    """`start`, `end` and `label` of each entity, in characters."""
    age: int
    treatment: Treatment


def notes(style: Style, patients: int, rng: Random) -> Iterator[Note]:
    """Yield one to three notes of each patient, about the same problems."""
    for number in range(patients):
        who = {"age": rng.randrange(20, 90, 5), "sex": rng.choice(("man", "woman"))}
        problem = rng.choice(PROBLEMS)
        for _ in range(rng.randint(1, 3)):
            dose = rng.choice(style.dose).format(n=rng.choice((2, 5, 10, 20, 50, 80)))
            yield _note(f"p{number:04}", style, who, Treatment(problem, rng.choice(style.medicines), dose), rng)


def _note(patient: str, style: Style, who: dict[str, Any], treatment: Treatment, rng: Random) -> Note:
    absent = rng.choice([problem for problem in PROBLEMS if problem != treatment.problem])
    # A problem that the patient does not have is text, and no entity.
    filler = rng.choice(style.fillers).replace("{problem}", absent)
    entities = treatment._asdict()
    sentences = [rng.choice(style.treated), filler]
    rng.shuffle(sentences)
    text, spans = rng.choice(style.openings).format(**who) + " ", []
    for piece in re.split(r"\{(\w+)\}", " ".join(sentences)):
        if piece in entities:
            spans.append({"start": len(text), "end": len(text) + len(entities[piece]), "label": piece})
        text += str(entities.get(piece, piece))
    return Note(patient, text, tuple(spans), who["age"], treatment)


def question(note: Note, rng: Random) -> tuple[str, str]:
    """Return a question about a note, and the answer, which stands in it."""
    return rng.choice(
        (
            ("which dose is given ?", note.treatment.dose),
            ("which medicine is given ?", note.treatment.medicine),
            ("what is treated ?", note.treatment.problem),
            ("how old is the patient ?", str(note.age)),
        )
    )


def words() -> list[str]:
    """Return the words of the language: of all sources, and the public list of medicines. None is of a note alone."""
    styles = (PUBLIC, *HOSPITALS.values(), *EXTERNAL.values(), *NEW_SITE.values())
    phrases = (phrase for style in styles for several in style[:4] for phrase in several)
    asked = "which dose medicine is given ? what treated how old the patient and man woman"
    spoken = " ".join([*phrases, asked, *PROBLEMS, *map(str, range(20, 90, 5)), "2 5 10"])
    return list(dict.fromkeys([*re.sub(r"\{\w+\}", "", spoken).split(), *MEDICINES]))


def entity_rows(some: Sequence[Note]) -> list[dict[str, Any]]:
    return [{"patient": note.patient, "text": note.text, "label": list(note.spans)} for note in some]


def question_rows(some: Sequence[Note], rng: Random) -> list[dict[str, str]]:
    rows = []
    for note in some:
        asked, answer = question(note, rng)
        rows.append({"patient": note.patient, "instruction": asked, "input": note.text, "output": answer})
    return rows


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
