"""Tables in Markdown, and the blocks of docs/evidence.md that commands write: from `<!-- begin: COMMAND -->` on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence.md"
END = "\n<!-- end -->"


def block(command: str, document: Path = EVIDENCE) -> str:
    """Return what a document has of a command. Raises ValueError if it has no block for it."""
    return _parts(command, document)[1].strip("\n")


def write_block(command: str, lines: Iterable[str], document: Path = EVIDENCE) -> None:
    """Replace a document's block of a command. Raises ValueError if it has none."""
    before, _, after = _parts(command, document)
    document.write_text(f"{before}\n\n{tidied(lines)}\n{after}", encoding="utf-8")


def tidied(lines: Iterable[str]) -> str:
    """Return the text of lines, as it stands in a block."""
    return "\n".join(lines).strip("\n")


def table_head(columns: Sequence[str]) -> Iterator[str]:
    """Yield the first two lines of a Markdown table."""
    yield table_row(columns)
    yield "|" + "---|" * len(columns)


def table_row(cells: Iterable[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _parts(command: str, document: Path) -> tuple[str, str, str]:
    # Without its line's end, which is where the end of an empty block begins.
    begin = f"<!-- begin: {command} -->"
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    inside, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{document.name} has no block of this command: add the lines {begin}{END}")
    return before + begin, inside, END + after
