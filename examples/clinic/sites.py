"""Folders of tables, one for each site, and the settings of the sites' workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tessera.examples.clinic.notes import (
    EXTERNAL,
    HOSPITALS,
    NEW_SITE,
    Style,
    entity_rows,
    notes,
    question_rows,
    write_rows,
)
from tessera.examples.staging import DemoFailed

TRAINING = "in-domain"
SETTINGS: Mapping[str, Mapping[str, Style]] = {TRAINING: HOSPITALS, "external": EXTERNAL, "new-site": NEW_SITE}
"""The sources of notes in each setting. Hospitals of the first one train, and hold patients out to measure on."""

RANKS = (4, 8, 16)
HELD_OUT = 0.15
TESTED = 100
"""Patients of a site that trains nothing."""
BUDGET = 2.0
"""The privacy that all runs together may spend of a data set, in epsilons of a run: two runs fit."""


@dataclass(frozen=True)
class Site:
    name: str
    setting: str
    tables: Mapping[str, Path]
    """The table of each task."""
    rank: int | None
    """The largest rank of adapters that its machine trains; None if it trains nothing."""

    def dataset(self, task: str) -> str:
        """Return the name of a task's data set here."""
        return task if self.rank else f"{task}-{self.setting}"


def write_tables(folder: Path, patients: int) -> None:
    """Write the tables of each site, in the layout that `read_sites` reads, with this many patients at hospitals that
    train."""
    rng = Random(0)
    for setting, styles in SETTINGS.items():
        for site, style in styles.items():
            home = folder / setting / site
            home.mkdir(parents=True)
            some = list(notes(style, patients if setting == TRAINING else TESTED, rng))
            write_rows(home / "entities.jsonl", entity_rows(some))
            write_rows(home / "questions.jsonl", question_rows(some, rng))


def read_sites(folder: Path, tasks: Sequence[str]) -> list[Site]:
    """Return the sites with the tables `SETTING/SITE/TASK.jsonl` in a folder. Raises DemoFailed.

    Hospitals that train have ranks 4, 8, 16, 4 ... in the order of their names.
    """
    found: list[Site] = []
    for setting in SETTINGS:
        homes = sorted(path for path in (folder / setting).glob("*") if path.is_dir())
        for number, home in enumerate(homes):
            tables = {task: file for task in tasks if (file := home / f"{task}.jsonl").is_file()}
            rank = RANKS[number % len(RANKS)] if setting == TRAINING else None
            if tables:
                found.append(Site(home.name, setting, tables, rank))
    for task in tasks:
        if not having(found, task, TRAINING):
            raise DemoFailed(f"no table to train on: write {folder / TRAINING / 'HOSPITAL' / f'{task}.jsonl'}")
        for setting in SETTINGS:
            if setting != TRAINING and len(several := having(found, task, setting)) > 1:
                names = ", ".join(site.name for site in several)
                raise DemoFailed(f"{folder / setting} has {task}.jsonl of {names}: leave one of them there")
    return found


def having(sites: Sequence[Site], task: str, setting: str) -> list[Site]:
    """Return the sites of a setting that have a task's table."""
    return [site for site in sites if site.setting == setting and task in site.tables]


def entity_classes(sites: Sequence[Site]) -> list[str]:
    """Return the classes of words, from the types of entities in the tables. Raises DemoFailed.

    In a study of institutions its lead states the classes, since no person reads the tables of all sites.
    """
    types = set()
    for table in (site.tables["entities"] for site in sites if "entities" in site.tables):
        for number, line in enumerate(table.read_text(encoding="utf-8").splitlines()):
            try:
                types |= {span["label"] for span in json.loads(line)["label"]}
            except (ValueError, KeyError, TypeError) as fault:
                form = '{"patient": "p1", "text": "no gout", "label": [{"start": 3, "end": 7, "label": "problem"}]}'
                raise DemoFailed(f"{table}, row {number}, has no spans of entities: write it as {form}") from fault
    return ["O", *(f"{begin}-{name}" for name in sorted(types) for begin in "BI")]


def worker_settings(
    site: Site,
    url: str,
    token_file: Path,
    tokenizers: Mapping[str, Path],
    classes: Sequence[str],
    lengths: Mapping[str, int],
    rule: Mapping[str, object] | None,
) -> str:
    """Return a site's worker.toml.

    `tokenizers` and `lengths` (in tokens) are by task, `classes` are the entities'. `rule` is the privacy
    that a hospital requires of each run; None if it requires none.
    """
    rule = {**rule, "evaluations": True} if rule and site.rank else None
    lines = [
        f"url = {_toml(url)}",
        f"token_file = {_toml(str(token_file))}",
        'name = "worker-1"',
        f"state_dir = {_toml(str(token_file.parent / 'state'))}",
        f"kinds = {_toml(['train', 'rehearse', 'evaluate'] if site.rank else ['evaluate'])}",
        'device = "cpu"',
        "threads = 1",
        "# Between institutions keep the default, 16 s: durations reveal less then.",
        "duration_quantum_seconds = 0.01",
        "",
    ]
    if site.rank:
        lines += ["[resources]", "# The largest rank of adapters for this machine.", f"lora_rank = {site.rank}", ""]
    if rule:
        lines += [
            "[policy]",
            "# Refuse a run that protects patients less. `evaluations` permits rounded figures of held-out patients.",
            f"require_privacy = {_inline(rule)}",
            "",
        ]
    for task, table in site.tables.items():
        lines += [
            f"[datasets.{site.dataset(task)}]",
            *_KINDS[task],
            *([f"labels = {_toml(list(classes))}"] if task == "entities" else []),
            f"file = {_toml(str(table))}",
            f"tokenizer = {_toml(str(tokenizers[task]))}",
            f"max_length = {lengths[task]}",
            "# All rows of a patient are protected together, and held out together.",
            'group = "patient"',
            f"held_out = {HELD_OUT}" if site.rank else 'use = "evaluate"',
        ]
        if rule:
            spent = {**rule, "epsilon": BUDGET * float(str(rule["epsilon"]))}
            lines += ["# All runs together may spend no more.", f"privacy = {_inline(spent)}"]
        lines.append("")
    return "\n".join(lines)


_KINDS = {
    "entities": ('kind = "text"', 'head = "token-classification"', "spans = true", 'absent = "any"'),
    "questions": ('kind = "chat"', 'layout = "instruction"'),
}


def _toml(value: object) -> str:
    # JSON's numbers, lists and ASCII strings are TOML's.
    return json.dumps(value)


def _inline(table: Mapping[str, object]) -> str:
    return "{ " + ", ".join(f"{name} = {_toml(value)}" for name, value in table.items()) + " }"
