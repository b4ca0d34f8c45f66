"""The demo's output on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from tessera.examples.federation import CLASSES, Holding, label_counts
from tessera.examples.ledger import Entry, percent_of_full, stages

HEADER = (
    f"{'round':>5}  {'stage':<8} {'cohort':>6}  {'accuracy':<14} {'macro F1':<14} "
    f"{'down':>9} {'up':>9} {'of full':>8} {'s':>5}"
)


def print_skew(console: Console, holdings: Sequence[Holding]) -> None:
    """Print the number of images per digit and site."""
    table = Table(title="Images of each digit at each site", title_justify="left", box=None, header_style="bold")
    table.add_column("site")
    for digit in range(CLASSES):
        table.add_column(str(digit), justify="right")
    table.add_column("in all", justify="right")
    for holding in holdings:
        counts = label_counts(holding)
        shown = [str(count) if count else "[dim]-[/]" for count in counts]
        table.add_row(holding.site, *shown, str(sum(counts)), style="dim" if holding.kind == "evaluate" else "")
    console.print(table)


def print_header(console: Console) -> None:
    what = "Bytes are per site; 'of full' is their share of the whole model, uncompressed, both ways."
    console.print(f"\n{what}", soft_wrap=True)
    console.print(f"[bold]{HEADER}[/]", soft_wrap=True)


def print_round(console: Console, entry: Entry, before: Mapping[str, float]) -> None:
    """Print a line for a round, with the change of its scores since the previous round."""
    colour = "cyan" if entry.stage == "frozen" else "yellow"
    down, up = (decimal(count // max(1, entry.accepted)) for count in (entry.download_bytes, entry.upload_bytes))
    console.print(
        f"{entry.number:>5}  [{colour}]{entry.stage:<8}[/] {f'{entry.accepted}/{entry.asked}':>6}  "
        f"{_change(entry.scores, before, 'accuracy')} {_change(entry.scores, before, 'macro_f1')} "
        f"{down:>9} {up:>9} {percent_of_full([entry]):>7.1f}% {entry.seconds:>5.1f}",
        soft_wrap=True,
    )


def _change(scores: Mapping[str, float], before: Mapping[str, float], name: str) -> str:
    """Return a score and its change, 14 columns wide."""
    if name not in scores:
        return f"{'-':<14}"
    change = scores[name] - before[name] if name in before else 0.0
    colour = "green" if change > 0 else "red" if change < 0 else "dim"
    return f"{scores[name]:.3f} [{colour}]{change:+.3f}[/]  "


def print_summary(console: Console, entries: Sequence[Entry], seconds: float) -> None:
    """Print scores and bytes per stage and in total: accuracy after the first round, at best and after the last."""
    table = Table(
        title=f"{len(entries)} rounds in {seconds:.0f} s", title_justify="left", box=None, header_style="bold"
    )
    for column in ("stage", "rounds", "accuracy", "best", "last", "down", "up", "in full", "of full"):
        table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=True)
    for name, members in stages(entries).items():
        table.add_row(name, *_figures(members))
    table.add_section()
    table.add_row("whole run", *_figures(entries), style="bold")
    console.print()
    console.print(table)


def _figures(entries: Sequence[Entry]) -> tuple[str, ...]:
    accuracies = [entry.scores["accuracy"] for entry in entries if "accuracy" in entry.scores]
    marks = (accuracies[0], max(accuracies), accuracies[-1]) if accuracies else ()
    return (
        str(len(entries)),
        *(f"{mark:.3f}" for mark in marks or ()),
        *("-" for _ in range(3 - len(marks))),
        decimal(sum(entry.download_bytes for entry in entries)),
        decimal(sum(entry.upload_bytes for entry in entries)),
        decimal(sum(entry.full_bytes for entry in entries)),
        f"{percent_of_full(entries):.1f}%",
    )
