"""The part about the tables in the document, with its plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from common.document import EVIDENCE, write_block
from evidence.plan import Plan
from evidence.report.lines import lines, repeated_lines
from evidence.report.pictures import drawable, picture, picture_name
from evidence.report.rows import Found, Run

COMMAND = "python -m evidence"


def section(plan: Plan, found: Found, digest: str, repeated: Sequence[Run] = ()) -> Iterator[str]:
    """Yield the document's part about the tables, line by line."""
    with_runs = [name for name in plan.tables if any(job.table == name for job in found)]
    missing = [name for name in plan.tables if name not in with_runs]
    yield f"Plan: `evidence.toml`, SHA-256 {digest}."
    if missing:
        yield f"No run is saved of {', '.join(missing)}."
    if with_runs:
        yield from lines(plan, found, with_runs)
        if drawn := [name for name in with_runs if drawable(plan, found, name)]:
            yield "\nBands and bars of the plots are one standard error of the mean over seeds, to each side."
        yield from (f"\n![{name}]({picture_name(name)})" for name in drawn)
    if repeated:
        yield from repeated_lines(repeated)


def write(plan: Plan, found: Found, digest: str, document: Path = EVIDENCE, repeated: Sequence[Run] = ()) -> None:
    """Write the part about the tables into the document, and their plots beside it."""
    write_block(COMMAND, section(plan, found, digest, repeated), document)
    for name in plan.tables:
        if drawable(plan, found, name):
            picture(plan, found, name, document.parent / picture_name(name))
