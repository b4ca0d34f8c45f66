"""The shell lines of the documents, and whether what they name exists.

A block of a page is run by a test, in its order, or the page's source has the reason why not, just before it:
`<!-- not run: it installs packages -->`. Pages that run by themselves are listed in tests/system/test_documents.py.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from tessera.shared.cli.main import installed
from tests.support.paths import ROOT

PAGES = tuple(
    page
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "operating")
    for page in sorted(folder.glob("*.md"))
    # A record of its time.
    if page.name != "CHANGELOG.md"
)
_BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?```(?:sh|console)\n(?P<text>.*?)```", re.DOTALL)
_OPERATORS = {"|", "&&", "||", ";", ">", ">>", "<", "&"}


@dataclass(frozen=True)
class Block:
    line: int
    text: str
    reason: str | None
    """Why no test runs it."""


def blocks(page: Path) -> list[Block]:
    document = page.read_text()
    return [
        Block(document.count("\n", 0, found.start("text")) + 1, found["text"], found["reason"])
        for found in _BLOCK.finditer(document)
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block, each as its words, without variables set for it, redirections and comments."""
    lines = [line.removeprefix("$ ") for line in text.splitlines() if "$ " not in text or line.startswith("$ ")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        words: list[str] = []
        parts = shlex.shlex(line, posix=True, punctuation_chars=True)
        parts.whitespace_split = True
        parts.commenters = "#"
        skipped = False
        for word in parts:
            if word in _OPERATORS:
                if word in {"|", "&&", "||", ";"}:
                    yield words
                    words = []
                else:
                    skipped = True
            elif skipped:
                skipped = False
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)
        if words:
            yield words


def faults(words: list[str]) -> Iterator[str]:
    """What a command names that is not there."""
    program, *arguments = words
    if program == "tessera":
        yield from _faults_of_tessera(arguments)
    elif program == "make":
        folder = ROOT
        if arguments[:1] == ["-C"]:
            folder, arguments = ROOT / arguments[1], arguments[2:]
        targets = set(re.findall(r"^([a-z-]+):", (folder / "Makefile").read_text(), re.MULTILINE))
        yield from (f"no target {name}" for name in arguments if "=" not in name and name not in targets)
    elif program == "python" and arguments[:1] == ["-m"]:
        if importlib.util.find_spec(arguments[1]) is None:
            yield f"no module {arguments[1]}"
        if arguments[1] == "pytest":
            yield from (f"no file {name}" for name in arguments[2:] if not (ROOT / name).exists())
    elif program == "pip":
        extras = {
            part for name in arguments for part in re.findall(r"\.\[(.*)\]", name)[:1] for part in part.split(",")
        }
        there = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
        yield from (f"no extra {extra}" for extra in extras - there)


def _faults_of_tessera(arguments: list[str]) -> Iterator[str]:
    part, *arguments = arguments
    if part not in installed():
        yield f"no command {part}"
        return
    command: Any = get_command(installed()[part].load())
    context = command.context_class(command, info_name=f"tessera {part}")
    while hasattr(command, "get_command") and arguments:
        found = command.get_command(context, arguments[0])
        if found is None:
            yield f"no command {arguments[0]} in {context.command_path}"
            return
        context = found.context_class(found, info_name=arguments[0], parent=context)
        command, arguments = found, arguments[1:]
    try:
        given, left, _ = command.make_parser(context).parse_args(list(arguments))
    except Exception as fault:  # noqa: BLE001 (Typer brings a click of its own, or does not)
        yield f"{context.command_path}: {fault}"
        return
    if left:
        yield f"{context.command_path} takes no {left}"
    for parameter in command.get_params(context):
        if parameter.required and given.get(parameter.name) in (None, ()):
            yield f"{context.command_path} lacks {parameter.name}"
