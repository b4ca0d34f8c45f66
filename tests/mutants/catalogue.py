"""Faults of one line each, put into a copy of the tree: the tests that are named beside each must fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    file: str
    old: str
    """A line, or a part of one, that the file has exactly once."""
    new: str
    tests: tuple[str, ...]
    """Paths, as pytest takes them, that fail when `old` is `new`."""


def _mutants() -> Iterator[Mutant]:
    """Read the mutants of `lines.txt`: below a file and its tests, each line before and after the change."""
    file, tests, old = "", (), ""
    for line in Path(__file__).with_name("lines.txt").read_text().splitlines():
        match line[:2]:
            case "- ":
                old = line[2:]
            case "+ ":
                yield Mutant(file, old, line[2:], tests)
            case _ if line:
                file, _, named = line.partition(": ")
                tests = tuple(named.split())


MUTANTS = tuple(_mutants())
