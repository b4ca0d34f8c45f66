"""Plain English, checked: `python -m tests.prose`, a part of `make check`.

Docstrings, messages, help texts, templates, documents and public names contain no word of the stop-list. Docstrings
do not begin with a relative clause. The subjects of commits have at most 72 characters. Ruff checks that the
docstrings of functions begin with an imperative (D401).

In the code of `CLEAN`, docstrings, comments and messages have no pronoun or relative clause where a noun belongs, and
public classes are named by nouns. `python -m tests.prose PLACE...` lists these faults of any place.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
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
_DANGLING = {
    r"(?i:return|yield)s? whether": "Return True if ...",
    r"(?i:return|yield)s? (?:what|which|how|where|who|why)": "name the thing that is returned",
    r"(?:about|after|as|at|before|by|for|from|in|into|like|of|on|over|than|to|under|with|without) what": (
        "name the thing"
    ),
    r"(?:is|are|was|were|be|not|all) what|what (?:it|they|its|their|each)": "name the thing",
    r"(?:(?:^|(?<=[.:;(] ))(?i:those)|(?i:return|yield|with|by) (?:those|that)) of": "repeat the noun",
    r"[Tt]he ones|[Tt]he one(?=[.,;:]|$| (?:after|at|before|by|for|from|in|of|on|that|to|which|whose|with|is)\b)": (
        "repeat the noun"
    ),
    r"(?<!, )(?<!each )(?<!one )(?<!some )(?<!most )(?<!none )(?<!any )(?<!all )(?<!both )(?<!two )of which|"
    r"of which[^.;:]*(?:which|whose)": "use whose, or two sentences",
    r"(?<!here )(?:is|are|was|were) none(?! of)": "write is not a ...",
    r"all that": "everything that, or the noun",
    r"(?:^|(?<=[.:;] ))(?:What|Whose|Whoever|Which|Those (?:that|which|who|with))(?! [^.]*\?)": "name the thing",
}
"""Pronouns and clauses that make a reader ask "which one?", and what to write in their place."""
_DANGLES = [(re.compile(rf"(?:\b|(?=^)){pattern}\b"), advice) for pattern, advice in _DANGLING.items()]
_NO_NOUN = re.compile(
    r"\w{2,}(?<!e)ed|"
    r"Adaptive|Below|Built|Busy|Drawn|Exact|Freed|Gone|Held|Kept|Known|Lent|Outer|Plain|Recent|Rest|Rung|Sent|"
    r"Some|Sparse|Withheld|Written|\w+[a-z]s(?:Nothing|OnlyIf)|Joining|Waiting|Guarding|Forwarding"
)
"""The last word, or the whole, of a class name that is a participle, an adjective or a sentence."""

_CODE = re.compile(r"```.*?```|`[^`\n]*`|(?<=\])\([^)\n]*\)", re.DOTALL)
"""Code, and the targets of links."""
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

PRODUCT = ("coordinator", "worker", "shared")
CHECKED_COMMITS = "c938e56..HEAD"
"""The subjects of those that came before the rule stay as they are."""
MAX_SUBJECT_LENGTH = 72
HISTORY = re.compile(r"CHANGELOG\.md")
"""A record of its time."""
CLEAN = tuple(f"{side}/*" for side in ("tessera", "examples", *PRODUCT))
"""The whole product, and its examples."""
DATA = ROOT / "examples/llm/instructions.py"
"""Sentences to train on."""


def main(places: list[str]) -> int:
    faults = [*_dangling_faults(places or CLEAN), *_class_faults(places or CLEAN)]
    if not places:
        faults += [*_source_faults(), *_document_faults(), *_commit_faults()]
    for fault in faults:
        print(fault, file=sys.stderr)
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


def _dangling_faults(places: Iterable[str]) -> Iterator[str]:
    for path in {*_files(*places)} - {DATA}:
        for line, text in {".py": _texts, ".md": _paragraphs}.get(path.suffix, lambda _: ())(path):
            yield from (f"{path.relative_to(ROOT)}:{line}: {found}" for found in dangling(text))


def dangling(text: str) -> Iterator[str]:
    """Yield each pronoun or clause of a text that stands where a noun belongs, with advice."""
    for pattern, advice in _DANGLES:
        yield from (
            f"{match[0]!r}: {advice}: {text[max(0, match.start() - 40) : match.end() + 40]}"
            for match in pattern.finditer(text)
        )


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, messages and comments of a file, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield node.lineno, " ".join(node.value.split())
    lines: list[tuple[int, str]] = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                lines.append((token.start[0], token.string.strip("# ")))
            elif token.type != tokenize.NL and lines:
                yield lines[0][0], " ".join(line for _, line in lines)
                lines = []


def _paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and table cells of a document, each with its line."""
    plain = _CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), path.read_text(encoding="utf-8"))
    for match in re.finditer(r"(?:[^\n|]+(?:\n(?![-\n|#]))?)+", plain):
        yield plain.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


def _class_faults(places: Iterable[str]) -> Iterator[str]:
    """Yield the public classes that no noun names. Exceptions may be named by what happened."""
    classes = {
        path: [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
        ]
        for path in _files(*(f"{side}/*.py" for side in PRODUCT))
    }
    raised = {"Exception"}
    bases = {
        n.name: {ast.unparse(base).rpartition(".")[2] for base in n.bases}
        for nodes in classes.values()
        for n in nodes
    }
    while (
        found := {
            name for name, above in bases.items() if any(base in raised or base.endswith("Error") for base in above)
        }
        - raised
    ):
        raised |= found
    for path in {*_files(*places)} & {*classes}:
        for node in classes[path]:
            if not node.name.startswith("_") and node.name not in raised and _NO_NOUN.fullmatch(node.name):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: the class {node.name}: name it by a noun"


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
    sys.exit(main(sys.argv[1:]))
