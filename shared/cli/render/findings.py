"""How `doctor` commands tell what they found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import typer

from tessera.shared.cli.render import output
from tessera.shared.diagnostics.checks import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def tell(findings: Iterable[Finding], *, as_json: bool) -> None:
    """Print each finding as it comes, or all as JSON. Raises Exit with code 1 if any is `fail`."""
    seen: list[Finding] = []
    console = output.out()
    for finding in findings:
        seen.append(finding)
        if not as_json:
            colour = COLOURS[finding.verdict]
            console.print(f"[{colour}]{finding.verdict:4}[/] {finding.name:14} ", end="")
            console.print(finding.detail, markup=False, soft_wrap=True)
            if finding.remedy:
                console.print(f"{'':20}{finding.remedy}", markup=False, soft_wrap=True)
    if as_json:
        output.print_json({"findings": [asdict(finding) for finding in seen]})
    if any(finding.verdict == "fail" for finding in seen):
        raise typer.Exit(1)
