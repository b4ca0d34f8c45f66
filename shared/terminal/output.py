"""Output of the commands: results on stdout, progress and errors on stderr, so that stdout can be piped."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TextIO

import typer
from pydantic import BaseModel, TypeAdapter
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from tessera.shared.diagnostics import Finding, Setting
from tessera.shared.problems import MAX_FAULTS, Problem
from tessera.shared.sanitize import fit_to_show
from tessera.shared.units import duration

_JSON = "tessera.json"

# The width of a pipe, wide enough for whole ids.
PIPE_COLUMNS = 160

_ANY = TypeAdapter(Any)


def _remember(ctx: typer.Context, value: bool) -> bool:
    # A context shares `meta` with its parents, which show a problem after the command has ended.
    ctx.meta[_JSON] = value
    return value


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.", callback=_remember)]
"""The `--json` option of every command."""

Reach = Annotated[
    list[float] | None,
    typer.Option(
        "--score",
        metavar="SCORE",
        help="Show rounds, time and bytes until this score; may be repeated. By default 90 % and 95 % of the best.",
    ),
]


def wants_json(ctx: typer.Context) -> bool:
    """Return True if the command under `ctx` was run with `--json`."""
    return bool(ctx.meta.get(_JSON))


class Terminal(Console):
    """A console that removes escape sequences and bidirectional controls, which rich passes and workers may send."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(fit_to_show(text), **options)


def _is_terminal(stream: TextIO | None) -> bool:
    # A stream that the shell has closed is None.
    return stream is not None and stream.isatty()


def out() -> Console:
    """Return the console for results."""
    return Terminal(width=None if _is_terminal(sys.stdout) else PIPE_COLUMNS, highlight=False)


def err() -> Console:
    """Return the console for progress and errors."""
    return Terminal(stderr=True, width=None if _is_terminal(sys.stderr) else PIPE_COLUMNS, highlight=False)


def complain(sentence: str) -> None:
    # A carriage return of an option or a variable would hide the rest of the line.
    err().print(f"[red]error:[/] {escape(fit_to_show(sentence))}", soft_wrap=True)


def note(sentence: str) -> None:
    """Print a remark to stderr."""
    err().print(escape(sentence), soft_wrap=True)


def show_problem(problem: Problem, *, as_json: bool) -> None:
    """Print a problem as text on stderr, and with `as_json` its document on stdout too."""
    complain(problem.detail)
    shown = problem.errors[:MAX_FAULTS]
    console = err()
    for fault in shown:
        console.print(f"  {escape(fault.pointer)}: {escape(fault.detail)}", soft_wrap=True)
    if len(problem.errors) > len(shown):
        console.print(f"  and {len(problem.errors) - len(shown)} more")
    console.print(escape(problem.advice), soft_wrap=True)
    if problem.page:
        console.print(escape(f"More about it: {problem.page}"), soft_wrap=True)
    if as_json:
        print_json(problem.document())


def print_json(value: BaseModel | Iterable[BaseModel] | dict[str, Any], *, line: bool = False) -> None:
    """Print a value as JSON on stdout, indented or on one line."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else _ANY.dump_python(value, mode="json")
    typer.echo(json.dumps(plain, indent=None if line else 2))


def show(value: BaseModel | Iterable[BaseModel] | dict[str, Any], shown: RenderableType, *, as_json: bool) -> None:
    """Print a result as JSON, or as `shown`."""
    if as_json:
        print_json(value)
    else:
        out().print(escape(shown) if isinstance(shown, str) else shown)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> Table:
    """Return a table with these columns, those in `right` aligned for numbers. None is shown as a dash."""
    result = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    aligned = set(right)
    for column in columns:
        result.add_column(
            escape(column), justify="right" if column in aligned else "left", no_wrap=column in {"id", *aligned}
        )
    for row in rows:
        result.add_row(*("-" if cell is None else escape(str(cell)) for cell in row))
    return result


def progress(*, quiet: bool) -> Progress:
    """Return a progress bar in bytes on stderr, disabled if `quiet` or if stderr is not a terminal."""
    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal)


def share(value: float | None) -> str | None:
    """Return a fraction of one, such as an accuracy, with three decimals."""
    return None if value is None else f"{value:.3f}"


def seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def about(value: float) -> str:
    """Return an estimated number of seconds, in a unit that suits its precision."""
    return f"about {duration(value)}"


def print_settings(settings: Iterable[Setting], *, as_json: bool) -> None:
    listed = list(settings)
    rows = [(one.name, "none" if one.value is None else one.value, one.origin) for one in listed]
    shown = table(("setting", "value", "from"), rows)
    show({"settings": [asdict(setting) for setting in listed]}, shown, as_json=as_json)


COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> None:
    """Print each finding as soon as it is found, or all as JSON. Raises Exit with code 1 if any is `fail`."""
    seen: list[Finding] = []
    console = out()
    for finding in findings:
        seen.append(finding)
        if not as_json:
            colour = COLOURS[finding.verdict]
            console.print(f"[{colour}]{finding.verdict:4}[/] {finding.name:14} ", end="")
            console.print(finding.detail, markup=False, soft_wrap=True)
            if finding.remedy:
                console.print(f"{'':20}{finding.remedy}", markup=False, soft_wrap=True)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in seen]})
    if any(finding.verdict == "fail" for finding in seen):
        raise typer.Exit(1)
