"""Plain English, checked: `python -m tests.prose`, a part of `make check`.

Docstrings, messages, help texts, templates, documents and public names contain no word of the stop-list. Docstrings
do not begin with a relative clause. The subjects of commits have at most 72 characters. Ruff checks that the
docstrings of functions begin with an imperative (D401).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

STOP_LIST = {
    "tell": "send, report, inform",
    "heed": "apply, respect, read",
    "bear": "handle, tolerate",
    "hand in": "submit",
    "come to": "reach, result in, amount to",
    "be had": "is available",
    "take up": "apply, accept, read",
    "whoever": "name the actor: the caller, the site, the worker",
    "nobody": "no caller, no site, no worker",
    "somebody": "name the actor",
    "anybody": "name the actor",
    "everybody": "all callers, all sites",
    "whatever": "any, every, regardless of",
    "so many": "n, a number of, that many",
    "anew": "again, from the start",
    "mend": "fix, repair",
    "wish": "request, want",
    "dice": "random, seed",
    "lest": "so that ... not",
    "hearken": "listen",
}
"""What not to write, and what to write in its place. Whole words, in every form of the verbs."""

_FORMS = {
    "tell": "tells|told|telling",
    "heed": "heeds|heeded|heeding",
    "bear": "bears|bore|borne|bearing",
    "hand in": "hands in|handed in|handing in",
    "come to": "comes to|came to|coming to",
    "take up": "takes up|took up|taken up|taking up",
    "mend": "mends|mended|mending",
    "wish": "wishes|wished",
}
_STOPPED = re.compile(
    rf"\b({'|'.join(f'{word}|{_FORMS[word]}' if word in _FORMS else word for word in STOP_LIST)})\b", re.IGNORECASE
)
_RELATIVE = re.compile(r"(What|How|Who|Whose|Whether|Where|Which|Why|When)\b(?!.*\?)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`|(?<=\])\([^)\n]*\)", re.DOTALL)
"""Code, and the targets of links."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

PRODUCT = ("coordinator", "worker", "shared")
CHECKED_COMMITS = "c938e56..HEAD"
"""The subjects of those that came before the rule stay as they are."""
MAX_SUBJECT_LENGTH = 72
HISTORY = re.compile(r"CHANGELOG\.md")
"""A record of its time."""


def main() -> int:
    faults = [*_source_faults(), *_document_faults(), *_commit_faults()]
    print(*faults, sep="\n", file=sys.stderr)
    return min(len(faults), 1)


def _files(*patterns: str) -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return (ROOT / line for line in listed.stdout.splitlines())


def _source_faults() -> Iterator[str]:
    for path in _files(*(f"{side}/*.py" for side in PRODUCT)):
        where = path.relative_to(ROOT)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in {*where.with_suffix("").parts, *_public_names(tree)} - {"tell"}:  # a file's own method
            yield from (f"{where}: the name {name}: {found}" for found in stopped(" ".join(_WORDS.findall(name))))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for found in stopped(node.value):
                    yield f"{where}:{node.lineno}: {found}"
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = node.value.value.splitlines()[0]
                if _RELATIVE.match(text):
                    yield f"{where}:{node.lineno}: the docstring begins with a relative clause: {text}"


def _public_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _document_faults() -> Iterator[str]:
    for path in _files("README.md", "docs/*.md", "coordinator/*.html", "examples/*.toml", "deploy"):
        where = path.relative_to(ROOT)
        if HISTORY.match(str(where)):
            continue
        text = path.read_text(encoding="utf-8")
        # Code keeps its place, so that the lines are those of the file.
        plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
        for number, line in enumerate(plain.splitlines(), 1):
            yield from (f"{where}:{number}: {found}" for found in stopped(line))


def stopped(text: str) -> Iterator[str]:
    """Yield each stop-list word of a text, with what to write in its place."""
    for match in _STOPPED.finditer(text):
        form = match[0].lower()
        word = next(word for word in STOP_LIST if form == word or form in _FORMS.get(word, "").split("|"))
        yield f"{form!r}: write {STOP_LIST[word]}"


def _commit_faults() -> Iterator[str]:
    log = ["git", "log", "--no-merges", "--format=%h %s", CHECKED_COMMITS]
    # A shallow clone or an archive has no history to check.
    listed = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        digest, _, subject = line.partition(" ")
        if len(subject) > MAX_SUBJECT_LENGTH:
            length = f"{len(subject)} characters, {MAX_SUBJECT_LENGTH} at most"
            yield f"commit {digest}: its subject has {length}: {subject}"


if __name__ == "__main__":
    sys.exit(main())
